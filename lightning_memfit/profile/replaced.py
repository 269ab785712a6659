"""Attributes and functions of other packages, replaced for the time of a trace."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch.utils._device import _device_constructors


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a class or module for a while."""
    keep_constructors()
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def replaced_everywhere(functions: Mapping[Any, Any]) -> Iterator[None]:
    """Set others for functions for a while, in every imported module that names them.

    Args:
        functions: What takes the place of each.
    """
    keep_constructors()
    wanted = {id(function): other for function, other in functions.items()}
    found = [
        (names, name, value)
        for names in _naming(frozenset(wanted))
        for name, value in list(names.items())
        if id(value) in wanted
    ]
    for names, name, value in found:
        names[name] = wanted[id(value)]
    try:
        yield
    finally:
        for names, name, value in found:
            names[name] = value


def _naming(wanted: frozenset[int]) -> Iterator[dict[str, Any]]:
    """Namespaces of imported modules that name functions with these numbers.

    A large program has thousands of modules with hundreds of thousands of names, which are compared by number, and no
    module is asked for an attribute, as it may answer by importing others.
    """
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            names = object.__getattribute__(module, "__dict__")
            if not wanted.isdisjoint(map(id, list(names.values()))):
                yield names


def keep_constructors() -> None:
    """Have torch list the functions that heed `with torch.device(...)` while they are its own.

    It lists them once, as it first needs them. Those that are replaced at that moment would never heed it again: with
    `torch.tensor` among them, transformers doesn't see that it builds a model on the meta device, takes buffers for
    initialized that are not, and `from_pretrained` returns models with whatever was in memory.
    """
    _device_constructors()
