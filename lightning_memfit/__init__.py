"""lightning-memfit: give it any LightningModule and any machine, and it makes training fit.

Public names are those of `__init__.pyi`, which type checkers read. They are imported on first use, so that `import
lightning_memfit` costs nothing.
"""

from importlib import import_module
from pathlib import Path

from lightning_memfit import one_lightning

__version__ = "0.2.0"

one_lightning.unite()

_IMPORTS = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()

# Name and the module it is imported from, by the lines `from MODULE import NAME as NAME`.
_PUBLIC = {line.split()[3]: line.split()[1] for line in _IMPORTS if line.startswith("from ")}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        names = ", ".join(_PUBLIC)
        raise AttributeError(f"module 'lightning_memfit' has no attribute {name!r}. Public names: {names}.")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
