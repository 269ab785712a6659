"""lightning-memfit: give it any LightningModule and any machine, and it makes training fit.

Public names are imported on first use, so that `import lightning_memfit` costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "MemoryBreakdown": "lightning_memfit.memory",
    "format_bytes": "lightning_memfit.memory",
    "parse_bytes": "lightning_memfit.memory",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        names = ", ".join(_PUBLIC)
        raise AttributeError(f"module 'lightning_memfit' has no attribute {name!r}. Public names: {names}.")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
