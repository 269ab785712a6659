"""`kept_libraries`: fake tensors that a traced step leaves in libraries are taken out again, or can't be used.

A library may make a table when it is first asked for it, and remember it for the process: in a global variable, a
dictionary, a cached function or a class. In a trace that table is fake, and a real step that met it would compute
nothing, without an error. Globals of all modules, what is cached in them, and attributes of classes are looked through
when a trace ends (`outside` keeps what the user's own modules hold in more ways than these). Whatever is not found is
refused when a real step uses it: the fakes of a trace that has ended compute nothing any more.
"""

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CACHED = type(functools.lru_cache(len))
_MISSING: Any = object()
_DEPTH = 2
"""Containers inside a container that are looked through for a fake."""

_MOST_ENTRIES = 1000

_KNOWN = {"torch", "lightning", "transformers", "numpy", "scipy", "sympy", "pandas", "torchmetrics", "pyarrow"}
"""Packages of thousands of modules and classes, none of which keeps tensors of a step by itself."""


class KeptFakeError(RuntimeError):
    """A real step has met a tensor that was made while memory was predicted."""


@contextmanager
def kept_libraries(fake_mode: FakeTensorMode) -> Iterator[None]:
    """In this context a step is traced with fakes of a mode, which compute nothing afterwards.

    Raises:
        KeptFakeError: Later, where something computes with one of them that was left somewhere else.
    """
    named = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] not in _KNOWN]
    modules = [module for _, module in named if type(module) is types.ModuleType]
    before = [dict(vars(module)) for module in modules]
    owners: list[tuple[Any, dict[str, Any]]] = list(zip(modules, before, strict=True))
    owners += [(kind, dict(vars(kind))) for kind in _classes(owners)]
    marks = [(value, _mark(value)) for _, names in owners for value in _kept_by(names.values())]
    try:
        yield
    finally:
        fake_mode.dispatch = _refuse  # type: ignore[method-assign]
        for owner, names in owners:
            _put_back(owner, names)
        for value, mark in marks:
            if _mark(value) != mark:
                _take_out(value)


def _classes(owners: list[tuple[Any, dict[str, Any]]]) -> list[type]:
    """Classes that modules define."""
    found: dict[int, type] = {}
    for module, names in owners:
        for value in names.values():
            if isinstance(value, type) and getattr(value, "__module__", None) == module.__name__:
                found[id(value)] = value
    return list(found.values())


def _kept_by(values: Iterable[Any]) -> Iterator[Any]:
    """Containers and caches among the values of names, and those that functions have as defaults and attributes."""
    for value in values:
        if type(value) in _MARKS:
            yield value
        elif type(value) is types.FunctionType:
            if value.__dict__:
                yield value.__dict__
            yield from (one for one in value.__defaults__ or () if type(one) in _MARKS)


_MARKS: dict[type, Callable[[Any], int]] = {
    dict: len,
    list: len,
    set: len,
    _CACHED: lambda cached: int(cached.cache_info().misses),
}
"""What changes where something is added, by the type of what is looked through."""


def _mark(value: Any) -> Any:
    return _MARKS[type(value)](value)


def _put_back(owner: Any, before: dict[str, Any]) -> None:
    """Set attributes back that a fake was put into."""
    now = vars(owner)
    # Names and values by identity, without a step of Python for each of hundreds of thousands.
    if now.keys() == before.keys() and list(map(id, now.values())) == list(map(id, before.values())):
        return
    for name, value in dict(now).items():
        if before.get(name, _MISSING) is not value and _holds_fake(value):
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


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
