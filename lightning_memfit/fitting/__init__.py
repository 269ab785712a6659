"""Micro-batches of a constant effective batch, and surviving out-of-memory errors."""
