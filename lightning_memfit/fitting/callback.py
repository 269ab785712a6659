"""The path by which configurations written by 0.1.0 name `MicroBatching`."""

from lightning_memfit.fitting.step.callback import MicroBatching as MicroBatching
