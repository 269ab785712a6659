"""Micro-batches of a constant effective batch, and surviving out-of-memory errors."""

from lightning_memfit.fitting.callback import MicroBatching

__all__ = ["MicroBatching"]
