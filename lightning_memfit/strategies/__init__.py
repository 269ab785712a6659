"""Strategies for more than one device, and for models beyond one: importing this registers them by name."""

from lightning_memfit.strategies.registry import register
from lightning_memfit.strategies.zero import ZeroStrategy

register()

__all__ = ["ZeroStrategy"]
