"""`OtherThreads`: what threads that are no part of a trial step may change while it runs.

Python doesn't tell which thread has changed an object. The names in the code that a thread may run do: what it never
names, and was not given, it doesn't change. `one_at_a_time` lets one thread after the other run trial steps, as these
replace functions and settings of the whole process.
"""

import functools
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import thread as pools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from lightning_memfit.memory.wrapping import attributes_of
from lightning_memfit.profile.culprit import owner_of, owner_of_frame
from lightning_memfit.profile.replaced import replaced
from lightning_memfit.profile.seal import current_seal, is_sealed_thread

_one = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread runs a trial step, unless this thread is part of it."""
    if current_seal() is not None:
        yield
        return
    with _one:
        yield


_MOST_GIVEN = 10_000
"""Objects that are followed from what a thread was given."""

_MOST_REACHED = 200_000
"""Objects and pieces of code that are looked at for names; where there are more, any name may be used."""

_WITHOUT_CODE = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray)

_WRAPPERS = (
    MethodType,
    BuiltinMethodType,
    functools.partial,
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
)

_PARTS = ("__func__", "__self__", "__wrapped__", "fget", "fset", "fdel", "func", "args", "keywords")

_FUNCTIONS = (FunctionType, MethodType, BuiltinMethodType, functools.partial)

_EVENT_LOOPS = ("asyncio", "uvloop")


@dataclass
class _Doings:
    """What one thread does."""

    code: list[tuple[CodeType, dict[str, Any]]] = field(default_factory=list)
    """The user's code that it runs, from which it may call other, with its global names."""
    packages: set[str] = field(default_factory=set)
    """Libraries that run in it."""
    given: dict[int, Any] = field(default_factory=dict)
    """Objects that it holds, and what lies in them, but not their attributes: these its code must name."""
    is_unknown: bool = False
    """Whether it may run any code."""

    def add_frames(self, frame: FrameType | None) -> None:
        """Add what runs."""
        while frame is not None:
            if owner_of_frame(frame) == "user":
                self.code.append((frame.f_code, frame.f_globals))
                self.add_given(dict(frame.f_locals).values() if frame.f_locals is not frame.f_globals else ())
            elif str(frame.f_globals.get("__name__")).startswith(_EVENT_LOOPS):
                self.is_unknown = True  # any of its tasks
            frame = frame.f_back

    def add_call(self, function: Any, given: Iterable[Any]) -> None:
        """Add a function with its arguments."""
        given = list(given)
        while isinstance(function, (functools.partial, MethodType)):
            if isinstance(function, MethodType):
                given.append(function.__self__)
                function = function.__func__
            else:
                given += [*function.args, *function.keywords.values()]
                function = function.func
        if isinstance(function, BuiltinMethodType):
            given.append(function.__self__)
        elif not isinstance(function, FunctionType):
            given.append(function)
            function = getattr(type(function), "__call__", None)  # noqa: B004  (its code, not whether it has any)
        if isinstance(function, FunctionType):
            owner = owner_of(function.__code__.co_filename)
            if owner == "user":
                self.code.append((function.__code__, function.__globals__))
                given += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
            elif owner == "library":
                self.packages.add(function.__module__.partition(".")[0])
        self.add_given(given)

    def add_given(self, values: Iterable[Any]) -> None:
        """Add objects."""
        waiting = list(values)
        while waiting and len(self.given) < _MOST_GIVEN:
            value = waiting.pop()
            if id(value) in self.given or isinstance(value, (str, bytes, int, float, type(None), type, ModuleType)):
                continue
            self.given[id(value)] = value
            if isinstance(value, _FUNCTIONS):
                self.add_call(value, ())
            elif _is_users_class(type(value)):
                waiting += [one for one in (attributes_of(value) or {}).values() if isinstance(one, _FUNCTIONS)]
            elif isinstance(value, dict):
                waiting += list(dict.values(value))
            elif isinstance(value, (list, tuple, set, frozenset)):
                waiting += list(value)


class OtherThreads:
    """Notes threads that run beside a step, and what they do.

    Args:
        step: Objects whose classes' code the step runs.
    """

    def __init__(self, step: Iterable[Any]) -> None:
        self._step = tuple(step)
        self._doings: dict[Any, _Doings] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Note what is running now, what is started until the end, and what is running then."""
        before = {thread: _nanoseconds(thread) for thread in _others()}
        for thread in before:
            self._note(thread)
        start, run = threading.Thread.start, pools._WorkItem.run

        def start_noted(thread: threading.Thread) -> None:
            if current_seal() is None:
                self._of(thread).add_call(*_target(thread))
            start(thread)

        def run_noted(item: Any) -> None:
            if current_seal() is None:
                self._of(pools).add_call(item.fn, (*item.args, *item.kwargs.values()))
            run(item)

        with ExitStack() as stack:
            stack.enter_context(replaced(threading.Thread, "start", start_noted))
            stack.enter_context(replaced(pools._WorkItem, "run", run_noted))
            try:
                yield
            finally:
                for thread in _others():
                    self._note(thread)
                for thread, spent in before.items():
                    if spent is not None and spent == _nanoseconds(thread):  # it has waited all the time
                        del self._doings[thread]

    def __bool__(self) -> bool:
        return bool(self._doings)

    def may_change(self, value: Any, name: tuple[Any, ...], package: str) -> bool:
        """Whether one of them may have changed an object.

        Args:
            value: The object.
            name: How it is reached, from its module or class on.
            package: Where its class is from.
        """
        return any(
            one.is_unknown or id(value) in one.given or package in one.packages for one in self._doings.values()
        ) or _is_in(name, self._names)

    def step_may_change(self, name: tuple[Any, ...]) -> bool:
        """Whether the step may have changed an object."""
        return _is_in(name, self._names_of_step)

    def may_set(self, name: str) -> bool:
        """Whether one of them may have set what code sets by a name."""
        return bool(self) and (any(one.is_unknown for one in self._doings.values()) or name in self._names)

    def step_may_set(self, name: str) -> bool:
        """Whether the step may have, too."""
        return name in self._names_of_step

    def _of(self, key: Any) -> _Doings:
        return self._doings.setdefault(key, _Doings())

    def _note(self, thread: threading.Thread) -> None:
        doings = self._of(thread)
        try:
            doings.add_call(*_target(thread))
            doings.add_frames(sys._current_frames().get(thread.ident or 0))
        except Exception:  # an object of the thread's may refuse to be looked at
            doings.is_unknown = True

    # --- names ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _names(self) -> "_Names":
        doings = list(self._doings.values())
        return _Names(
            (code for one in doings for code in one.code), (what for one in doings for what in one.given.values())
        )

    @functools.cached_property
    def _names_of_step(self) -> "_Names":
        return _Names((), self._step)


class _Names:
    """Every name that code may use: its own, and those of the user's functions that it may call.

    A global name is looked up where the code would look it up. A method may be called by its name if an object of its
    class is held by what was given, or if code that is run names the class: rapid type analysis (Bacon and Sweeney,
    OOPSLA 1996).

    Args:
        code: Code that is run, with its global names.
        given: Objects that it holds.
    """

    def __init__(self, code: Iterable[tuple[CodeType, dict[str, Any]]], given: Iterable[Any]) -> None:
        self._names: set[str] = set()
        self._code: list[tuple[CodeType, dict[str, Any]]] = list(code)
        self._objects: list[Any] = list(given)
        self._known: dict[int, Any] = {}
        self._uncalled: dict[str, list[Any]] = {}
        """Functions and classes that are reached once their name is used."""
        while self._code or self._objects:
            self._add_code(*self._code.pop()) if self._code else self._add_object(self._objects.pop())

    def __contains__(self, name: str) -> bool:
        return name in self._names or len(self._known) >= _MOST_REACHED

    def _add_code(self, code: CodeType, names: dict[str, Any]) -> None:
        if id(code) in self._known:
            return
        self._known[id(code)] = code
        constants = {one for one in code.co_consts if isinstance(one, str)}  # of `setattr`, or keys
        found = {*code.co_names, *code.co_freevars, *code.co_cellvars, *constants}
        for name in found - self._names:
            self._objects += self._uncalled.pop(name, ())
        self._names |= found
        self._objects += [names[name] for name in found if name in names]
        self._objects += [sys.modules[name] for name in found if name in sys.modules]
        self._code += [(one, names) for one in code.co_consts if isinstance(one, CodeType)]

    def _add_object(self, value: Any) -> None:
        if isinstance(value, _WITHOUT_CODE) or id(value) in self._known or len(self._known) >= _MOST_REACHED:
            return
        self._known[id(value)] = value
        if isinstance(value, FunctionType):
            if owner_of(value.__code__.co_filename) == "user":
                self._code.append((value.__code__, value.__globals__))
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            self._objects += [*cells, *vars(value).values()]
        elif isinstance(value, type):
            if _is_users_class(value):
                self._objects += value.__mro__
                called = {name for base in value.__mro__ if not _is_users_class(base) for name in vars(base)}
                self._add_members(vars(value), called)  # a library calls what is written over its own
        elif isinstance(value, ModuleType):
            if owner_of(str(getattr(value, "__file__", ""))) == "user" or vars(value) is _main():
                self._add_members(vars(value))
        elif isinstance(value, dict):
            self._objects += list(dict.values(value))
        elif isinstance(value, (list, tuple, set, frozenset)):
            self._objects += list(value)
        else:
            parts = (getattr(value, part, None) for part in _PARTS) if isinstance(value, _WRAPPERS) else ()
            self._objects += [type(value), *parts, attributes_of(value)]

    def _add_members(self, members: Mapping[str, Any], called: Collection[str] = ()) -> None:
        for name, value in list(members.items()):
            if name in self._names or name in called or name.startswith("__"):  # which Python calls by itself
                self._objects.append(value)
            else:
                self._uncalled.setdefault(name, []).append(value)


def _others() -> list[threading.Thread]:
    """Threads that run, less this one and those of a sealed step."""
    own = threading.get_ident()
    return [
        one for one in threading.enumerate() if one.ident not in (None, own) and not is_sealed_thread(one.ident or 0)
    ]


def _target(thread: threading.Thread) -> tuple[Any, tuple[Any, ...]]:
    return getattr(thread, "_target", None) or thread.run, tuple(getattr(thread, "_args", ()))


def _nanoseconds(thread: threading.Thread) -> int | None:
    """For how long a thread has had a core; None where the system doesn't tell.

    The first number of Linux's `schedstat` (Documentation/scheduler/sched-stats.rst).
    """
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _main() -> Any:
    return getattr(sys.modules.get("__main__"), "__dict__", None)


def _is_in(name: tuple[Any, ...], names: _Names) -> bool:
    return any(isinstance(part, str) and part in names for part in name)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_users_class(kind: type) -> bool:
    module: Any = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return owner_of(file) == "user" if isinstance(file, str) else kind.__module__ == "__main__"
