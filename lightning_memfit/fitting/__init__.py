"""Micro-batches at a constant effective batch, and recovery from out-of-memory errors."""

from lightning_memfit.fitting.step.callback import MicroBatching

__all__ = ["MicroBatching"]
