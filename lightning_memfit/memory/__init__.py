"""Memory in words and numbers: categories, tiers, byte formatting and the ledger of live tensor storages."""

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
