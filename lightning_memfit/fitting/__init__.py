"""Micro-batches of a constant effective batch, and surviving out-of-memory errors."""

from lightning_memfit.fitting.step.callback import MicroBatching

__all__ = ["MicroBatching"]
