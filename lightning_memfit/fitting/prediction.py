"""The path by which configurations written by 0.1.0 name `MemoryPrediction`."""

from lightning_memfit.fitting.size.prediction import MemoryPrediction as MemoryPrediction
