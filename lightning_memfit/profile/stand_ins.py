"""`stand_in`: what takes the place of an object that can't be noted, while a trial step runs.

Such objects change when they are used, and can't be set back. In the step's threads a stand-in of a file that is
written keeps nothing, and any other refuses to be used; other threads get the object itself.
"""

import contextvars
import copy
import csv
import io
import itertools
import operator
import queue
import socket
import sqlite3
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import override

from lightning_memfit.profile.copying import Untouchable
from lightning_memfit.profile.seal import current_seal

ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice))

COPIED_ITERATORS: tuple[type, ...] = (itertools.count, type(iter([])), type(iter(())), type(iter(range(0))))
"""Iterators that can be copied, but not set back."""

_UNTOUCHED = (
    types.GeneratorType,
    types.AsyncGeneratorType,
    types.CoroutineType,
    contextvars.Token,
    sqlite3.Connection,
    sqlite3.Cursor,
    socket.socket,
    queue.SimpleQueue,
)
"""Objects that can neither be copied nor set back."""

_OF_PROCESSES = (
    ("multiprocessing.shared_memory", "SharedMemory"),
    ("multiprocessing.shared_memory", "ShareableList"),
    ("multiprocessing.sharedctypes", "SynchronizedBase"),
    ("multiprocessing.queues", "Queue"),
    ("multiprocessing.queues", "SimpleQueue"),
    ("multiprocessing.connection", "_ConnectionBase"),
    ("multiprocessing.managers", "BaseProxy"),
)
"""Those that are shared with other processes."""

_REPLACED_NEVER = frozenset((dict, list, set, tuple, OrderedDict, type, types.FunctionType, types.ModuleType))
"""Usual classes, for speed."""

_CSV_WRITER: Any = type(csv.writer(io.StringIO()))

_NATIVE: Any = (type(int.__add__), type(len))


def stand_in(value: Any, shown: Callable[[], str]) -> Any:
    """What stands for an object that can't be noted, while the step runs; None for any other.

    Args:
        value: The object.
        shown: Its name in words.
    """
    kind = type(value)
    if kind in ATOMS or kind in _REPLACED_NEVER or isinstance(value, (Untouchable, UnwrittenFile)):
        return None
    if issubclass(kind, io.IOBase):
        if issubclass(kind, (io.StringIO, io.BytesIO)) or value.closed:
            return None
        if value.writable():
            return UnwrittenFile(value)
        return None if _can_be_set_back(value) else _Untouched(f"{shown()}, a {kind.__qualname__}", value)
    if kind is _CSV_WRITER:
        return csv.writer(io.StringIO())
    if issubclass(kind, _UNTOUCHED) or _is_native_iterator(kind) or _is_of_processes(kind):
        return _Untouched(f"{shown()}, a {kind.__qualname__}", value)
    return None


def moved_later(value: Any) -> Any:
    """What to put back for a value: a copy of an iterator that is moved by the step."""
    return copy.copy(value) if type(value) in COPIED_ITERATORS else value


def is_same(now: Any, before: Any) -> bool:
    """Whether a value is the one that was noted."""
    return now is before or (
        type(before) in COPIED_ITERATORS
        and type(now) is type(before)
        and (repr(now) == repr(before) if isinstance(now, itertools.count) else _left(now) == _left(before))
    )


def is_stand_in(value: Any) -> bool:
    """Whether an object stands for another one."""
    return isinstance(value, (_Untouched, UnwrittenFile))


def _left(iterator: Any) -> int:
    return operator.length_hint(iterator)


def _can_be_set_back(file: Any) -> bool:
    """Whether a file that is read can be read from the same place again."""
    try:
        if file.seekable():
            file.tell()
        return True
    except (OSError, ValueError):  # it is being iterated over
        return False


def _is_native_iterator(kind: type) -> bool:
    """Whether what an iterator has given can't be told from its attributes."""
    if kind in COPIED_ITERATORS:
        return False
    if kind.__module__.startswith("torch.utils.data"):
        return hasattr(kind, "__next__")
    return isinstance(getattr(kind, "__next__", None), _NATIVE)


def _is_of_processes(kind: type) -> bool:
    for module, name in _OF_PROCESSES:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and issubclass(kind, found):
            return True
    return False


class _Untouched(Untouchable):
    """Refuses to be used by a step, and is the object itself for other threads.

    Args:
        what: The object in words.
        value: The object.
    """

    def __init__(self, what: str, value: Any) -> None:
        super().__init__(what)
        object.__setattr__(self, "_value", value)

    @override
    def __getattr__(self, name: str) -> Any:
        if current_seal() is None:
            return getattr(object.__getattribute__(self, "_value"), name)
        return super().__getattr__(name)


def _for_others(name: str) -> Callable[..., Any]:
    def call(one: Any, *args: Any, **kwargs: Any) -> Any:
        if current_seal() is not None:
            return one._refuse()
        value = object.__getattribute__(one, "_value")
        return getattr(type(value), name)(value, *args, **kwargs)

    return call


for _name in ("call", "setattr", "iter", "next", "enter", "exit", "len", "getitem", "setitem", "delitem", "contains"):
    setattr(_Untouched, f"__{_name}__", _for_others(f"__{_name}__"))


class UnwrittenFile:
    """An open file that keeps nothing of what a trial step writes.

    Args:
        file: The file, which other threads write.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> Any:
        """Write nothing, and say that everything was written."""
        return len(data) if current_seal() is not None else self._file.write(data)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write nothing."""
        for line in lines:
            self.write(line)

    def truncate(self, size: int | None = None) -> Any:
        """Leave the file as long as it is."""
        return 0 if current_seal() is not None else self._file.truncate(size)

    def close(self) -> None:
        """Leave the file open."""
        if current_seal() is None:
            self._file.close()

    def __enter__(self) -> "UnwrittenFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
