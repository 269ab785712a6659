"""Memory in words and numbers: categories, tiers, byte formatting and the ledger of live tensor storages.

Names are imported on first use: most of what uses a module of this folder formats and breaks down nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_memfit.memory.breakdown import Category, MemoryBreakdown, Tier, pinned_block_bytes
    from lightning_memfit.memory.units import GIB, MIB, format_bytes, format_percent, parse_bytes

__all__ = [
    "GIB",
    "MIB",
    "Category",
    "MemoryBreakdown",
    "Tier",
    "format_bytes",
    "format_percent",
    "parse_bytes",
    "pinned_block_bytes",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        is_breakdown = name in ("Category", "MemoryBreakdown", "Tier", "pinned_block_bytes")
        return getattr(import_module(f"{__name__}.{'breakdown' if is_breakdown else 'units'}"), name)
