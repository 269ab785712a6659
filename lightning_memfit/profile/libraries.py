"""`kept_libraries`: fake tensors that a traced step leaves in libraries are taken out again, or can't be used.

A library may make a table when it is first asked for it, and remember it for the process: in a global variable, a
dictionary, a cached function or a class. In a trace that table is fake, and a real step that met it would compute
nothing, without an error. Globals of all modules, what is cached in them, and attributes of classes are looked through
when a trace ends (`outside` keeps what the user's own modules hold in more ways than these). Whatever is not found is
refused when a real step uses it: the fakes of a trace that has ended compute nothing any more.
"""

import functools
import gc
import itertools
import operator
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_memfit.profile.culprit import owner_of

_CACHED = type(functools.lru_cache(len))
_KEEPING = frozenset({dict, list, set, _CACHED})
_VALUES = operator.methodcaller("values")
_MISSING: Any = object()
_DEPTH = 2
"""Containers inside a container that are looked through for a fake."""

_MOST_ENTRIES = 1000

_KNOWN = {"torch", "lightning", "transformers", "numpy", "scipy", "sympy", "pandas", "torchmetrics", "pyarrow"}
"""Packages of thousands of modules and classes, none of which keeps tensors of a step by itself."""

_NOT_LOOKED_AT = _KNOWN | (sys.stdlib_module_names - {"__main__"})


_INSTALLED = ("library", "machinery")
"""Whose modules name nothing large."""


class KeptFakeError(RuntimeError):
    """A real step has met a tensor that was made while memory was predicted."""


@contextmanager
def kept_libraries(fake_mode: FakeTensorMode) -> Iterator[None]:
    """In this context a step is traced with fakes of a mode, which compute nothing afterwards.

    Raises:
        KeptFakeError: Later, where something computes with one of them that was left somewhere else.
    """
    packages = _packages()
    marks = [package.marks() for package in packages]
    try:
        yield
    finally:
        fake_mode.dispatch = _refuse  # type: ignore[method-assign]
        for package in packages:
            package.put_back()
        for package, before in zip(packages, marks, strict=True):
            package.take_out(before)


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

    def put_back(self) -> None:
        """Set attributes back that a fake was put into."""
        if self.is_unchanged():
            return
        for name, value in dict(vars(self.value)).items():
            if self.names.get(name, _MISSING) is not value and _holds_fake(value):
                if name in self.names:
                    setattr(self.value, name, self.names[name])
                else:
                    delattr(self.value, name)


class _Package:
    """Modules of one package and their classes, which are compared at once: a program has a hundred thousand names.

    Args:
        modules: The modules.
        known: The package as it was found before, if it was.
    """

    def __init__(self, modules: list[types.ModuleType], known: "_Package | None" = None) -> None:
        before = {id(owner.value): owner for owner in known.owners} if known else {}
        self.modules = modules
        self.owners: list[_Owner] = []
        for module in modules:
            owner = _as_it_is(module, before)
            self.owners.append(owner)
            for position, one in enumerate(owner.classes):
                owner.classes[position] = _as_it_is(one.value, {id(one.value): one})
            self.owners += owner.classes
        self._spaces = [vars(owner.value) for owner in self.owners]
        self._sizes = [len(owner.names) for owner in self.owners]
        self._values = [value for owner in self.owners for value in owner.names.values()]
        kept = [value for owner in self.owners for value in owner.kept]
        self._containers = [value for value in kept if type(value) is not _CACHED]
        self._caches = [value for value in kept if type(value) is _CACHED]

    def is_unchanged(self) -> bool:
        """Whether all names have the values that they had."""
        try:
            now = itertools.chain.from_iterable(map(_VALUES, self._spaces))
            return list(map(len, self._spaces)) == self._sizes and all(map(operator.is_, now, self._values))
        except RuntimeError:  # another thread has added to one of them meanwhile
            return False

    def put_back(self) -> None:
        """Set attributes back that a fake was put into."""
        if not self.is_unchanged():
            for owner in self.owners:
                owner.put_back()

    def marks(self) -> tuple[list[int], list[int]]:
        """What changes where something is added to a container, or to the results of a cached function."""
        return list(map(len, self._containers)), [cached.cache_info().misses for cached in self._caches]

    def take_out(self, before: tuple[list[int], list[int]]) -> None:
        """Take fakes out of what has changed since it had these marks."""
        for values, now, then in zip((self._containers, self._caches), self.marks(), before, strict=True):
            if now != then:
                for value, mark, earlier in zip(values, now, then, strict=True):
                    if mark != earlier:
                        _take_out(value)


_looked_at: dict[str, _Package] = {}
"""Installed packages, as the last trace found them: few of them change."""


def _packages() -> list[_Package]:
    """Packages that may keep what a step makes, as they are now.

    What is of Python's own library makes no tensors and knows of none.
    """
    found: dict[str, list[types.ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        package_name = name.partition(".")[0]
        if type(module) is types.ModuleType and package_name not in _NOT_LOOKED_AT:
            found.setdefault(package_name, []).append(module)
    packages = []
    for name, modules in found.items():
        package = known = _looked_at.get(name)
        if package is None or not _are_the_same(package.modules, modules) or not package.is_unchanged():
            package = _Package(modules, known)
            files = [file for one in modules if (file := getattr(one, "__file__", None))]
            if files and all(owner_of(file) in _INSTALLED for file in files):
                _looked_at[name] = package
            else:  # what others name may be large
                _looked_at.pop(name, None)
        packages.append(package)
    return packages


def _are_the_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _as_it_is(value: Any, before: dict[int, _Owner]) -> _Owner:
    """What a module or class names now, by what it was found to name before."""
    owner = before.get(id(value))
    return owner if owner is not None and owner.is_unchanged() else _Owner(value)


def _is_from(kind: type, module: types.ModuleType) -> bool:
    return getattr(kind, "__module__", None) == module.__name__


def _kept_by(values: Iterable[Any]) -> Iterator[Any]:
    """Containers and caches among the values of names, and those that functions have as defaults and attributes."""
    for value in values:
        kind = type(value)
        if kind in _KEEPING:
            yield value
        elif kind is types.FunctionType:
            if value.__dict__:
                yield value.__dict__
            if value.__defaults__:
                yield from (one for one in value.__defaults__ if type(one) in _KEEPING)


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
