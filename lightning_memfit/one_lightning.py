"""Let `lightning` and `pytorch_lightning` be one library in this process, whichever of the two is imported first.

Both packages hold the same code under two names, and a Trainer of one refuses callbacks, strategies and modules of the
other ("Expected a parent", "`model` must be a `LightningModule`"). This package is written with `lightning.pytorch`,
many public modules with `pytorch_lightning`. The one that is there stands for both: an import of a module by its other
name returns the same module.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

from typing_extensions import override

_TWINS = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


class _OtherName(MetaPathFinder, Loader):
    """Finds modules by their other names.

    Args:
        names: The name by which a package is asked for, and that of the one that it stands for.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self._specs: dict[str, ModuleSpec | None] = {}

    def _real(self, name: str) -> str | None:
        for other, real in self._names.items():
            if name == other or name.startswith(f"{other}."):
                return real + name.removeprefix(other)
        return None

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        real = self._real(fullname)
        found = None if real is None else _find(real)
        if found is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin, is_package=found.submodule_search_locations is not None)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(self._real(spec.name)))
        self._specs[spec.name] = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        """Give a module its own specification back, which an import by another name has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def _find(name: str) -> ModuleSpec | None:
    """A module's specification, without importing the packages that it is in, as `find_spec` would."""
    path, found, parts = None, None, name.split(".")
    for end in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:end]), path)
        if found is None:
            return None
        path = found.submodule_search_locations
    return found


def unite() -> None:
    """Choose the package that stands for both, the one that has been imported, else `lightning` where it is installed.

    Warns:
        UserWarning: If both have been imported. Nothing is changed then.
    """
    lightning, twin = "lightning.pytorch" in sys.modules, "pytorch_lightning" in sys.modules
    if lightning and twin:
        if sys.modules["lightning.pytorch"] is not sys.modules["pytorch_lightning"]:
            warnings.warn(
                "`lightning` and `pytorch_lightning`, two copies of one library, have both been imported. Callbacks "
                "and strategies of lightning_memfit need modules and the Trainer of `lightning`. For any module, "
                "import lightning_memfit before the two: it makes them one.",
                stacklevel=3,
            )
        return
    is_installed = find_spec("lightning") is not None
    if lightning or (is_installed and not twin):
        names = {twin: name for name, twin in _TWINS.items()}
    else:
        names = _TWINS if is_installed else {**_TWINS, "lightning": "pytorch_lightning"}
    sys.meta_path.insert(0, _OtherName(names))
