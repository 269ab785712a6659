"""`kept_libraries`: fake tensors that a traced step leaves in libraries are taken out again, or can't be used.

A library may make a table when it is first asked for it, and remember it for the process: in a global variable, a
dictionary, a cached function or a class. In a trace that table is fake, and a real step that met it would compute
nothing, without an error. Globals of all modules, what is cached in them, and attributes of classes are looked through
when a trace ends (`outside` keeps what the user's own modules hold in more ways than these). Whatever is not found is
refused when a real step uses it: the fakes of a trace that has ended compute nothing any more.
"""

import functools
import gc
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_memfit.profile.culprit import owner_of

_CACHED = type(functools.lru_cache(len))
_MISSING: Any = object()
_DEPTH = 2
"""Containers inside a container that are looked through for a fake."""

_MOST_ENTRIES = 1000

_KNOWN = {"torch", "lightning", "transformers", "numpy", "scipy", "sympy", "pandas", "torchmetrics", "pyarrow"}
"""Packages of thousands of modules and classes, none of which keeps tensors of a step by itself."""

_NOT_LOOKED_AT = _KNOWN | (sys.stdlib_module_names - {"__main__"})


class KeptFakeError(RuntimeError):
    """A real step has met a tensor that was made while memory was predicted."""


@contextmanager
def kept_libraries(fake_mode: FakeTensorMode) -> Iterator[None]:
    """In this context a step is traced with fakes of a mode, which compute nothing afterwards.

    Raises:
        KeptFakeError: Later, where something computes with one of them that was left somewhere else.
    """
    owners = list(_owners())
    marks = [(value, _mark(value)) for owner in owners for value in owner.kept]
    try:
        yield
    finally:
        fake_mode.dispatch = _refuse  # type: ignore[method-assign]
        for owner in owners:
            _put_back(owner)
        for value, mark in marks:
            if _mark(value) != mark:
                _take_out(value)


class _Owner:
    """What a module or a class names, and which of that may keep something more.

    Args:
        value: The module or class.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.names = dict(vars(value))
        self.kept = list(_kept_by(self.names.values()))
        self.classes: list[_Owner] = []
        if isinstance(value, types.ModuleType):
            own = {id(one): one for one in self.names.values() if isinstance(one, type) and _is_from(one, value)}
            self.classes = [_Owner(one) for one in own.values()]

    def is_unchanged(self) -> bool:
        now = list(vars(self.value).values())  # at once, as other threads may add to it
        return len(now) == len(self.names) and all(map(operator.is_, now, self.names.values()))


_looked_at: dict[str, _Owner] = {}
"""Modules of installed packages, as the last trace found them: few of them change."""


def _owners() -> Iterator[_Owner]:
    """Modules that may keep what a step makes, and their classes, as they are now.

    What is of Python's own library makes no tensors and knows of none.
    """
    for name, module in list(sys.modules.items()):
        if type(module) is not types.ModuleType or name.partition(".")[0] in _NOT_LOOKED_AT:
            continue
        owner = _looked_at.get(name)
        if owner is None or owner.value is not module or not owner.is_unchanged():
            owner = _Owner(module)
        if owner_of(getattr(module, "__file__", None) or "") == "library":  # what others name may be large
            _looked_at[name] = owner
        yield owner
        for position, one in enumerate(owner.classes):
            if not one.is_unchanged():
                owner.classes[position] = _Owner(one.value)
        yield from owner.classes


def _is_from(kind: type, module: types.ModuleType) -> bool:
    return getattr(kind, "__module__", None) == module.__name__


def _kept_by(values: Iterable[Any]) -> Iterator[Any]:
    """Containers and caches among the values of names, and those that functions have as defaults and attributes."""
    for value in values:
        kind = type(value)
        if kind in _MARKS:
            yield value
        elif kind is types.FunctionType:
            if value.__dict__:
                yield value.__dict__
            if value.__defaults__:
                yield from (one for one in value.__defaults__ if type(one) in _MARKS)


_MARKS: dict[type, Callable[[Any], int]] = {
    dict: len,
    list: len,
    set: len,
    _CACHED: lambda cached: int(cached.cache_info().misses),
}
"""What changes where something is added, by the type of what is looked through."""


def _mark(value: Any) -> Any:
    return _MARKS[type(value)](value)


def _put_back(owner: _Owner) -> None:
    """Set attributes back that a fake was put into."""
    if owner.is_unchanged():
        return
    for name, value in dict(vars(owner.value)).items():
        if owner.names.get(name, _MISSING) is not value and _holds_fake(value):
            if name in owner.names:
                setattr(owner.value, name, owner.names[name])
            else:
                delattr(owner.value, name)


def _take_out(value: Any) -> None:
    """Take fakes out of a container, or out of the results of a cached function."""
    if isinstance(value, dict):
        for key in [key for key, one in list(value.items()) if _holds_fake(one)]:
            value.pop(key, None)
    elif isinstance(value, list):
        value[:] = [one for one in value if not _holds_fake(one)]
    elif isinstance(value, set):
        value -= {one for one in value if _holds_fake(one)}
    elif any(_holds_fake(one) for entry in gc.get_referents(value) for one in (entry, *gc.get_referents(entry))):
        value.cache_clear()  # what it loses beside them is made again


def _holds_fake(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor)
    if depth > _DEPTH or not isinstance(value, (dict, list, tuple, set)) or len(value) > _MOST_ENTRIES:
        return False
    return any(_holds_fake(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value))


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise KeptFakeError(
        "A real step uses a tensor that was made while memory was predicted, and holds no numbers: something that the "
        "step calls has made it at first use and kept it, in a class, a function or a closure. Let it be made before "
        "training: call that once in `setup`, say."
    )
