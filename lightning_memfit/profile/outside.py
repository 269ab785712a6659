"""`kept_outside`: what a trial step changes outside of its copy is put back when it ends.

A copy of a module shares with it what isn't copied: global variables, classes, functions with their defaults, closures
and caches, and the settings of the process (`profile.settings`). What the user's code can reach there is noted before
the step and compared after it. What has changed is put back, so that no fake tensor in a global list meets the first
real step; what can't be put back is refused with its name.

Objects of the user's are followed to a depth of `_DEPTH`, those of libraries one step far, modules and their tensors as
a whole. So are global variables in every file of the user's whose functions and classes are met that way, and in the
files that these name: other files of a large program cost nothing. What can't be noted is replaced for the time of the
step (`profile.stand_ins`): writes go nowhere, and other uses are refused at their line, as `profile.copying` has it for
what a module holds.

What another thread has changed meanwhile stays, as far as its code tells (`profile.threads`); where the step may have
changed the same, the step is refused. By what threads wait for one another, such as locks, events and futures, is never
set back: the values in them belong to all threads. Objects that only a library knows are not looked at.
"""

import contextvars
import copy
import ctypes
import functools
import gc
import io
import mmap
import operator
import pickle
import random
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.memory.wrapping import attributes_of
from lightning_memfit.profile.culprit import owner_of
from lightning_memfit.profile.reads import meanings, names_in
from lightning_memfit.profile.seal import RefusedError
from lightning_memfit.profile.settings import kept_settings
from lightning_memfit.profile.stand_ins import ATOMS, COPIED_ITERATORS, is_same, is_stand_in, moved_later, stand_in
from lightning_memfit.profile.threads import OtherThreads
from lightning_memfit.profile.watched import Place

_DEPTH = 6
_MOST_ENTRIES = 10_000
"""Entries of one container that are followed. Larger containers are noted, but not what lies in them."""

_MOST_BYTES = 1 << 20
"""Data of one tensor or array that are noted as a whole. Of larger ones a change is noticed, but can't be undone."""

_OF_THREADS = (
    "_asyncio",
    "_multiprocessing",
    "_queue",
    "_thread",
    "asyncio",
    "concurrent",
    "multiprocessing",
    "queue",
    "sched",
    "selectors",
    "socketserver",
    "threading",
)
"""Packages of Python by whose objects threads and processes wait for one another."""


class NotKeptError(RefusedError):
    """A step has changed something outside of its copy that can't be put back.

    Args:
        name: What that is.
        reason: Why not.
    """

    def __init__(self, name: str, reason: str = "") -> None:
        BaseException.__init__(
            self,
            f"it changes {name}, which can't be put back{reason and ', as '}{reason}, and a trial step changes nothing "
            "outside of its copy. Let the module hold it, as what a module holds is copied",
        )


_OF_BOTH = "another thread that runs meanwhile names it, too"


@contextmanager
def kept_outside(module: Any, *others: Any) -> Iterator["Outside"]:
    """Put back what changes outside of a module's copy.

    Args:
        module: The user's module, a copy of which is run; None where there is none.
        others: Other objects that are used.

    Returns:
        What lies outside of the copy.

    Raises:
        NotKeptError: If something has changed that can't be put back.
    """
    threads = OtherThreads((module, *others))
    notes = _Notes(threads)
    lost: list[NotKeptError] = []
    with _own_context(), kept_settings(threads.may_set, threads.step_may_set) as shared:
        try:
            with threads.followed():
                with _disable_current_modes():  # a run around this one must not count what is noted
                    notes.take(module, others)
                yield Outside(notes)
        finally:
            with _disable_current_modes():
                lost += notes.put_back()
    lost += [NotKeptError(f"the setting `{name}`", _OF_BOTH) for name in shared]
    if lost:
        raise lost[0]


class Outside:
    """What lies outside of a module's copy and was noted.

    Args:
        notes: What was noted.
    """

    def __init__(self, notes: "_Notes") -> None:
        self._notes = notes

    def numbers(self) -> Iterator[Place]:
        """Containers that held numbers or iterators, with the key and name of each: namespaces, classes and cells."""
        for container, keys, name in self._notes.numbers:
            for key in keys:
                yield container, key, _shown((*name, key) if key is not None else name).strip("`")


_Name = tuple[Any, ...]
"""The parts of a name, put together only where it is told."""

_WHOLE: tuple[Any, ...] = (None,)
"""Stands for an object as a whole, where others name its keys."""


@dataclass(frozen=True, slots=True)
class _Note:
    """What an object was like."""

    value: Any
    name: _Name
    changed: Callable[[], Sequence[Any]]
    """Keys under which it has changed, or `_WHOLE`; empty if it has not."""
    put_back: Callable[[Sequence[Any]], bool]
    """Makes it what it was, under some of these keys; False if that is not possible."""
    has_keys: bool = False
    package: str = ""
    """Where the class of an object with attributes is from."""


class _Notes:
    """What objects were like, and how to make them so again.

    Args:
        threads: Threads that may change them, too.
    """

    def __init__(self, threads: OtherThreads) -> None:
        self._threads = threads
        self._kept: list[_Note] = []
        self.numbers: list[tuple[Any, list[Any], _Name]] = []
        """Containers, the keys of their numbers, and their names."""
        self._known: dict[int, Any] = {}
        self._waiting: deque[tuple[Any, int, _Name]] = deque()
        self._is_users: dict[str, bool] = {}
        self._kinds: dict[type, Any] = {}

    def take(self, module: Any, others: Iterable[Any]) -> None:
        """Note what a step of a module can reach."""
        children = list(module.modules()) if isinstance(module, torch.nn.Module) else []
        for child in children:  # the copy has its own tensors
            for tensor in (*child._parameters.values(), *child._buffers.values()):
                self._known[id(tensor)] = tensor
        self._wait(sys.modules.get("__main__"), 0, ("__main__",))
        others = [other for other in others if other is not None]
        self._wait_kinds((*children, *others))
        for child in children:
            for name, value in vars(child).items():
                if name not in _OF_THE_COPY and not (type(value) in _CONTAINERS and not value):
                    self._wait(value, 1, (type(child).__qualname__, name))
        for other in others:
            self._wait(other, 0, (type(other).__qualname__,))
        while self._waiting:
            self._visit(*self._waiting.popleft())

    def put_back(self) -> list[NotKeptError]:
        """Put everything back, the last noted first; what can't be."""
        lost = []
        for note in reversed(self._kept):
            try:
                changed = note.changed()
                if not changed:
                    continue
                own = [key for key in changed if not self._is_others(note, key)]
                shared = len(own) < len(changed) and any(
                    self._threads.step_may_change((*note.name, key)[1:]) for key in changed if key not in own
                )
                if shared:
                    lost.append(NotKeptError(_shown(note.name), _OF_BOTH))
                if own and not note.put_back(own):
                    lost.append(NotKeptError(_shown(note.name)))
            except Exception:  # whatever becomes of one object, the others are put back
                lost.append(NotKeptError(_shown(note.name)))
        return lost

    def _is_others(self, note: _Note, key: Any) -> bool:
        """Whether another thread may have changed an object, or what it has under a key."""
        if not self._threads:
            return False
        if is_stand_in(note.value.get(key) if note.has_keys else _content(note.value)):
            return False
        return self._threads.may_change(note.value, (*note.name, key)[1:], note.package)

    def _keep(self, value: Any, name: _Name, has_changed: Callable[[], bool], put_back: Callable[[], Any]) -> None:
        """Note an object as a whole.

        Args:
            value: The object.
            name: Its name.
            has_changed: Whether it is not what it was.
            put_back: Makes it what it was; False if that is not possible.
        """
        self._kept.append(
            _Note(value, name, lambda: _WHOLE if has_changed() else (), lambda _: put_back() is not False)
        )

    # --- finding ----------------------------------------------------------------------------------------------------

    def _wait(self, value: Any, depth: int, name: _Name) -> None:
        if type(value) not in ATOMS and id(value) not in self._known and depth <= _DEPTH:
            self._known[id(value)] = value
            self._waiting.append((value, depth, name))

    def _visit(self, value: Any, depth: int, name: _Name) -> None:
        kind = type(value)
        if kind not in self._kinds:
            self._kinds[kind] = next((keep for base, keep in _KEEPERS if issubclass(kind, base)), _Notes._keep_object)
        with suppress(Exception):  # an object of the user's may refuse to be looked at
            self._kinds[kind](self, value, depth, name)

    def _follow(self, values: Iterable[tuple[Any, Any]], depth: int, name: _Name) -> None:
        for key, value in values:
            if type(value) not in ATOMS:
                self._wait(value, depth + 1, (*name, key))

    def _is_users_module(self, name: str) -> bool:
        if name not in self._is_users:
            file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
            self._is_users[name] = _is_users_file(file, name)
        return self._is_users[name]

    def _wait_kinds(self, values: Iterable[Any]) -> None:
        for kind in dict.fromkeys(map(type, values)):
            for base in kind.__mro__:
                self._wait(base, 0, (base.__qualname__,))

    def _wait_module(self, name: str) -> None:
        """Note what a module of the user's names, wherever its code may run."""
        if name in sys.modules and self._is_users_module(name):
            self._wait(sys.modules[name], 0, (name,))

    def _skip(self, value: Any, depth: int, name: _Name) -> None:
        """Not followed."""

    def _note_numbers(self, container: Any, items: Iterable[tuple[Any, Any]], name: _Name) -> None:
        keys = [key for key, one in items if type(one) in _COUNTING]
        if keys:
            self.numbers.append((container, keys, name))

    # --- containers -------------------------------------------------------------------------------------------------

    def _keep_dict(
        self,
        value: dict[Any, Any],
        depth: int,
        name: _Name,
        but: frozenset[str] = frozenset(),
        package: str = "",
        ordered: bool = True,
    ) -> None:
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        # As a list at once, as other threads may change it.
        before = [(key, moved_later(one)) for key, one in list(kind.items(value)) if key not in but]
        self._kept.append(
            _Note(
                value,
                name,
                lambda: _changed_keys(kind, value, before, but, ordered),
                lambda keys: _put_back_keys(kind, value, before, keys),
                has_keys=True,
                package=package,
            )
        )
        self._note_numbers(value, before, name)
        if len(before) <= _MOST_ENTRIES:
            for key, one in before:
                replacement = stand_in(one, lambda key=key: _shown((*name, key)))  # type: ignore[misc]
                if replacement is not None:
                    kind.__setitem__(value, key, replacement)
            self._follow(before, depth, name)

    def _keep_list(self, value: list[Any], depth: int, name: _Name) -> None:
        before = list(value)
        is_followed = len(before) <= _MOST_ENTRIES
        if is_followed:
            before = [moved_later(one) for one in before]

        def has_changed() -> bool:
            if len(value) != len(before):
                return True
            return not all(map(is_same if is_followed else operator.is_, value, before))

        def put_back_entries() -> None:
            for place, one in enumerate(value):
                if id(one) in replaced:
                    list.__setitem__(value, place, replaced[id(one)])

        replaced: dict[int, Any] = {}
        stand_ins: list[Any] = []
        if is_followed:
            for place, one in enumerate(before):
                replacement = stand_in(one, lambda place=place: _shown((*name, place)))  # type: ignore[misc]
                if replacement is not None:
                    list.__setitem__(value, place, replacement)
                    stand_ins.append(replacement)
                    replaced[id(replacement)] = one
            self._follow(enumerate(before), depth, name)
        if replaced:  # also where the list itself is left as another thread has made it
            self._keep(stand_ins, (), lambda: True, put_back_entries)
        self._keep(value, name, has_changed, lambda: list.__setitem__(value, slice(None), before))

    def _keep_deque(self, value: deque[Any], depth: int, name: _Name) -> None:
        before = list(value)

        def put_back() -> None:
            deque.clear(value)
            deque.extend(value, before)

        self._keep(value, name, lambda: len(value) != len(before) or any(map(operator.is_not, value, before)), put_back)
        self._keep_entries(value, depth, name)

    def _keep_set(self, value: set[Any], depth: int, name: _Name) -> None:
        before = list(value)
        known = set(map(id, before))

        def put_back() -> None:
            set.clear(value)
            set.update(value, before)

        self._keep(
            value, name, lambda: len(value) != len(before) or not all(id(one) in known for one in value), put_back
        )
        self._keep_entries(value, depth, name)

    def _keep_entries(self, value: Any, depth: int, name: _Name) -> None:
        if len(value) <= _MOST_ENTRIES:
            self._follow(enumerate(list(value)), depth, name)

    def _keep_weak(self, value: Any, depth: int, name: _Name) -> None:
        """Note what lies in a weak dictionary or set; until it is put back, nothing of it goes."""
        is_set = isinstance(value, weakref.WeakSet)
        before = [(one, one) for one in value] if is_set else list(value.items())

        def entries() -> list[Any]:
            return [(one, one) for one in value] if is_set else list(value.items())

        def has_changed() -> bool:
            now = {id(key): one for key, one in entries()}
            return len(now) != len(before) or any(now.get(id(key), _MISSING) is not one for key, one in before)

        def put_back() -> None:
            value.clear()
            value.update([key for key, _ in before] if is_set else before)

        self._keep(value, name, has_changed, put_back)
        if len(before) <= _MOST_ENTRIES:
            self._follow(((place, one) for place, (_, one) in enumerate(before)), depth, name)

    def _keep_buffer(self, value: Any, depth: int, name: _Name) -> None:
        """Note bytes or numbers that can be written."""
        before = value[:] if len(value) <= _MOST_BYTES else None
        if before is not None:
            self._keep(value, name, lambda: bool(value != before), lambda: value.__setitem__(slice(None), before))
        else:
            self._keep_view(value, depth, name)

    def _keep_view(self, value: Any, depth: int, name: _Name) -> None:
        """Note memory that an object gives access to."""
        seen = memoryview(value)
        if seen.readonly or not seen.contiguous or not seen.nbytes:
            return
        step = max(1, seen.nbytes // _MOST_BYTES)
        before = np.frombuffer(seen, np.uint8)[::step].copy()
        del seen  # as who is looked into can't be resized

        def has_changed() -> bool:
            now = memoryview(value)
            return not np.array_equal(np.frombuffer(now, np.uint8)[::step], before)

        def put_back() -> bool:
            if step == 1:
                memoryview(value).cast("B")[:] = before.tobytes()
            return step == 1

        self._keep(value, name, has_changed, put_back)

    # --- code -------------------------------------------------------------------------------------------------------

    def _keep_module(self, value: types.ModuleType, depth: int, name: _Name) -> None:
        names = value.__dict__
        if type(names) is dict and _is_users_file(names.get("__file__"), value.__name__):
            self._keep_dict(names, 0, (value.__name__,), ordered=False)
        elif type(names) is dict:
            self._keep_names(value, (value.__name__,))

    def _keep_names(self, value: Any, name: _Name) -> None:
        """Note what a library's module or class names, of which only what the step's code may have set is put back.

        Libraries set names of their own when they are first used, and go by these later.
        """
        before = dict(vars(value))

        def changed() -> list[str]:
            new = [(key, one) for key, one in list(vars(value).items()) if before.get(key, _MISSING) is not one]
            return [key for key, one in new if _may_be_users(one) and self._threads.step_may_change((key,))]

        def put_back(keys: Sequence[str]) -> bool:
            for key in keys:
                setattr(value, key, before[key]) if key in before else delattr(value, key)
            return True

        self._kept.append(_Note(vars(value), name, changed, put_back, has_keys=True))

    def _keep_class(self, value: type, depth: int, name: _Name) -> None:
        if not self._is_users_module(value.__module__):
            if value.__flags__ & _OF_PYTHON:
                self._keep_names(value, name)
            return
        self._wait_module(value.__module__)
        before = dict(vars(value))

        def changed() -> list[str]:
            now = dict(vars(value))
            new = [key for key in now if key not in before]
            return [*new, *(key for key, one in before.items() if now.get(key, _MISSING) is not one)]

        def put_back(keys: Sequence[str]) -> bool:
            for key in keys:
                type.__setattr__(value, key, before[key]) if key in before else type.__delattr__(value, key)
            return True

        self._kept.append(_Note(vars(value), name, changed, put_back, has_keys=True))
        self._note_numbers(value, before.items(), name)
        for key, one in before.items():
            replacement = stand_in(one, lambda key=key: _shown((*name, key)))  # type: ignore[misc]
            if replacement is not None:
                type.__setattr__(value, key, replacement)
        self._follow(before.items(), depth, name)

    def _keep_function(self, value: Any, depth: int, name: _Name) -> None:
        if not self._is_users_module(str(value.__module__)) and owner_of(value.__code__.co_filename) != "user":
            return
        before = value.__defaults__, value.__kwdefaults__, value.__code__

        def has_changed() -> bool:
            return any(map(operator.is_not, (value.__defaults__, value.__kwdefaults__, value.__code__), before))

        def put_back() -> None:
            value.__defaults__, value.__kwdefaults__, value.__code__ = before

        self._keep(value, name, has_changed, put_back)
        self._keep_dict(vars(value), depth, name)
        if str(value.__globals__.get("__name__")) not in sys.modules:
            self._wait(value.__globals__, 0, (value.__module__,))
        package = str(value.__globals__.get("__package__") or "")
        for module in (str(value.__globals__.get("__name__")), *_modules_named_in(value.__code__, package)):
            self._wait_module(module)
        for imported in names_in(value.__code__).imports:
            for module in meanings(imported, package):
                self._wait_module(module)
        self._wait(value.__defaults__, depth + 1, (*name, "__defaults__"))
        self._wait(value.__kwdefaults__, depth + 1, (*name, "__kwdefaults__"))
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self._keep_cell(cell, depth, (*name, key))

    def _keep_cell(self, cell: Any, depth: int, name: _Name) -> None:
        if id(cell) in self._known:
            return
        self._known[id(cell)] = cell
        try:
            before = moved_later(cell.cell_contents)
        except ValueError:  # it is empty
            return
        replacement = stand_in(before, lambda: _shown(name))
        if replacement is not None:
            cell.cell_contents = replacement

        def put_back() -> None:
            cell.cell_contents = before

        self._keep(cell, name, lambda: not is_same(cell.cell_contents, before), put_back)
        self._note_numbers(cell, [(None, before)], name)
        self._wait(before, depth + 1, name)

    def _keep_cache(self, value: Any, depth: int, name: _Name) -> None:
        """Note which results a cached function has kept.

        Results that are taken out of its dictionary are no longer found, as Python's own code for it allows for: the
        next new result of a full cache goes with the place of one.
        """
        found = next((one for one in gc.get_referents(value) if type(one) is dict and one is not vars(value)), None)
        results: dict[Any, Any] = {} if found is None else found
        before, info = dict(results), value.cache_info()

        def put_back() -> bool:
            for key in [key for key in list(results) if key not in before]:
                results.pop(key, None)
            if found is None:
                value.cache_clear()
            return len(results) == len(before) and found is not None

        self._keep(value, name, lambda: value.cache_info().misses != info.misses, put_back)
        self._keep_dict(vars(value), depth, name)

    def _keep_parts(self, value: Any, depth: int, name: _Name) -> None:
        """Follow what wraps functions."""
        parts = ("__func__", "__self__", "fget", "fset", "fdel", "func", "args", "keywords")
        found = ((part, getattr(value, part, None)) for part in parts)
        self._follow(found, depth - 1, name)

    # --- objects ----------------------------------------------------------------------------------------------------

    def _keep_object(self, value: Any, depth: int, name: _Name) -> None:
        kind = type(value)
        if kind.__module__.startswith("lightning_memfit."):
            return
        self._wait_kinds([value])
        if not self._is_users_module(kind.__module__):
            depth = max(depth, _DEPTH - 2)
        of_threads = () if isinstance(value, threading.local) else tuple(filter(_is_of_threads, kind.__mro__))
        if kind in of_threads:
            return
        attributes = attributes_of(value)
        if type(attributes) is dict:
            self._keep_dict(attributes, depth, name, _attributes_of(of_threads), kind.__module__.partition(".")[0])
        bases = [base for base in kind.__mro__ if "__slots__" in vars(base) and base not in of_threads]
        slots = [one for base in bases for one in vars(base).values() if type(one) is types.MemberDescriptorType]
        if slots:
            self._keep_slots(value, slots, depth, name)

    def _keep_slots(self, value: Any, slots: list[Any], depth: int, name: _Name) -> None:
        before = [(slot, _in_slot(value, slot)) for slot in slots]

        def put_back() -> None:
            for slot, one in before:
                if _in_slot(value, slot) is not one:
                    slot.__delete__(value) if one is _MISSING else slot.__set__(value, one)

        self._keep(value, name, lambda: any(_in_slot(value, slot) is not one for slot, one in before), put_back)
        self._follow(((slot.__name__, one) for slot, one in before), depth, name)

    def _keep_context_variable(self, value: Any, depth: int, name: _Name) -> None:
        """Follow what a context variable holds; the variable itself is set back with its context."""
        self._follow([("value", value.get(None))], depth, name)

    def _keep_layers(self, value: torch.nn.Module, depth: int, name: _Name) -> None:
        self._wait_kinds(value.modules())
        for child in value.modules():
            self._known[id(child)] = child
            for attribute in _OF_LAYERS:
                one = vars(child).get(attribute)
                if one:
                    self._keep_dict(
                        one, depth if attribute in ("_parameters", "_buffers") else _DEPTH, (*name, attribute)
                    )
            self._keep_dict(vars(child), _DEPTH if child is not value else depth, name)

    # --- data -------------------------------------------------------------------------------------------------------

    def _keep_tensor(self, value: torch.Tensor, depth: int, name: _Name) -> None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_inference() or value.is_meta:
            return
        if value.layout != torch.strided:
            return
        with torch.no_grad():
            shown = value.detach()
            is_small = value.device.type == "cpu" and value.nbytes <= _MOST_BYTES
            saved = shown.clone() if is_small else None
        version, grad, requires_grad = value._version, value.grad if value.is_leaf else None, value.requires_grad

        def has_changed() -> bool:
            if value.is_leaf and (value.grad is not grad or value.requires_grad != requires_grad):
                return True
            if value.data_ptr() != shown.data_ptr():
                return True
            if saved is None:
                return value._version != version
            with torch.no_grad():  # kernels of batch normalization write without a new version
                return not torch.equal(shown, saved)

        def put_back() -> bool:
            is_kept = saved is not None or (value._version == version and value.data_ptr() == shown.data_ptr())
            if saved is not None:
                with torch.no_grad():
                    if not torch.equal(shown, saved):
                        shown.copy_(saved)
                    if value.data_ptr() != shown.data_ptr():
                        value.data = shown
            if value.is_leaf:
                if value.grad is not grad:
                    value.grad = grad
                if value.requires_grad != requires_grad:
                    value.requires_grad_(requires_grad)
            return is_kept

        self._keep(value, name, has_changed, put_back)
        self._wait(grad, depth, (*name, "grad"))

    def _keep_array(self, value: Any, depth: int, name: _Name) -> None:
        if type(value) not in (np.ndarray, np.memmap) or not value.flags.writeable:
            return
        if value.dtype.hasobject:
            self._keep_objects(value, depth, name)
            return
        step = max(1, int(value.nbytes) // _MOST_BYTES)
        before = value.flat[::step].copy()

        def has_changed() -> bool:
            return bool(not np.array_equal(value.flat[::step].view(np.uint8), before.view(np.uint8)))

        def put_back() -> bool:
            if step == 1:
                value.flat = before
            return step == 1

        self._keep(value, name, has_changed, put_back)

    def _keep_objects(self, value: Any, depth: int, name: _Name) -> None:
        """Note an array of objects, which refers to them as a list does."""
        before = value.copy()
        entries = [one for row in before.ravel().tolist() for one in (row if isinstance(row, tuple) else (row,))]

        def has_changed() -> bool:
            if before.dtype != object:
                return bool(value.tolist() != before.tolist())
            return any(map(operator.is_not, value.ravel().tolist(), entries))

        self._keep(value, name, has_changed, lambda: value.__setitem__(..., before))
        self._keep_entries(entries, depth, name)

    def _keep_state(self, value: Any, depth: int, name: _Name) -> None:
        """Note the state of a random generator."""
        read, write = _state_of(value)
        try:
            before = read()
        except NotImplementedError:  # a generator of the system's has none
            return
        shown = _bytes_of(before)
        self._keep(value, name, lambda: _bytes_of(read()) != shown, lambda: write(before))

    def _keep_file(self, value: Any, depth: int, name: _Name) -> None:
        """Note where a file is read next, and what one in memory holds."""
        if value.closed or not value.seekable():
            return
        in_memory = isinstance(value, (io.BytesIO, io.StringIO))
        if not (in_memory or value.readable()):
            return
        try:
            before, contents = value.tell(), value.getvalue() if in_memory else None
        except OSError:
            return

        def has_changed() -> bool:
            return bool(value.closed or value.tell() != before or (in_memory and value.getvalue() != contents))

        def put_back() -> bool:
            if value.closed:
                return False
            if in_memory and value.getvalue() != contents:
                value.seek(0)
                value.truncate()
                value.write(contents)
            value.seek(before)
            return True

        self._keep(value, name, has_changed, put_back)


_MISSING = object()

_OF_THE_COPY = {"_parameters", "_buffers", "_modules", "_trainer", "_fabric"}
"""Attributes of modules that a copy has of its own, or not at all."""

_OF_PYTHON = 1 << 9
"""Flag of classes that a `class` statement made (`Py_TPFLAGS_HEAPTYPE`): others can't be changed."""

_COUNTING = (int, float, *COPIED_ITERATORS)

_CONTAINERS = (dict, list, set, tuple, OrderedDict)

_OF_LAYERS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")

_Method = Callable[[_Notes, Any, int, _Name], None]

_KEEPERS: tuple[tuple[Any, _Method], ...] = (
    (dict, _Notes._keep_dict),
    (list, _Notes._keep_list),
    (deque, _Notes._keep_deque),
    (set, _Notes._keep_set),
    ((tuple, frozenset), _Notes._keep_entries),
    ((bytearray, array), _Notes._keep_buffer),
    ((memoryview, mmap.mmap, ctypes.Array, ctypes.Structure, ctypes.c_int.__base__), _Notes._keep_view),
    ((weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _Notes._keep_weak),
    (weakref.ref, _Notes._skip),
    (types.ModuleType, _Notes._keep_module),
    (type, _Notes._keep_class),
    (types.FunctionType, _Notes._keep_function),
    (type(functools.lru_cache(len)), _Notes._keep_cache),
    (
        (staticmethod, classmethod, property, types.MethodType, functools.partial, functools.cached_property),
        _Notes._keep_parts,
    ),
    (torch.nn.Module, _Notes._keep_layers),
    (torch.Tensor, _Notes._keep_tensor),
    (np.ndarray, _Notes._keep_array),
    ((np.random.Generator, np.random.RandomState, torch.Generator, random.Random), _Notes._keep_state),
    (contextvars.ContextVar, _Notes._keep_context_variable),
    (io.IOBase, _Notes._keep_file),
)
"""What is done with objects of a class, the first that fits; with all others `_keep_object`."""


def _modules_named_in(code: types.CodeType, package: str) -> Iterator[str]:
    """Modules that code may import, or look up by their names."""
    for name in (*code.co_names, *code.co_consts):
        if isinstance(name, types.CodeType):
            yield from _modules_named_in(name, package)
        elif isinstance(name, str):
            yield name
            yield f"{package}.{name}"


def _is_users_file(file: Any, module: str) -> bool:
    return owner_of(file) == "user" if type(file) is str else module == "__main__"


def _may_be_users(value: Any) -> bool:
    """Whether it is a plain value or a function of the user's."""
    if isinstance(value, types.FunctionType):
        return owner_of(value.__code__.co_filename) == "user"
    return type(value) in ATOMS


def _is_of_threads(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OF_THREADS


@functools.cache
def _attributes_of(kinds: tuple[type, ...]) -> frozenset[str]:
    """Names that the code of classes uses."""
    functions = [one for kind in kinds for one in vars(kind).values() if isinstance(one, types.FunctionType)]
    return frozenset(name for function in functions for name in function.__code__.co_names)


def _shown(name: _Name) -> str:
    return f"`{'.'.join(map(str, name))}`"


def _content(value: Any) -> Any:
    return value.cell_contents if isinstance(value, types.CellType) else None


def _in_slot(value: Any, slot: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _MISSING


def _changed_keys(
    kind: Any, value: dict[Any, Any], before: list[tuple[Any, Any]], but: frozenset[str], ordered: bool
) -> Sequence[Any]:
    now = [item for item in list(kind.items(value)) if not but or item[0] not in but]
    if len(now) == len(before) and all(a is b and is_same(c, d) for (a, c), (b, d) in zip(now, before, strict=True)):
        return ()
    wanted, found = dict(before), dict(now)
    gone = [key for key in wanted if key not in found]
    changed = [key for key, one in now if key not in wanted or not is_same(one, wanted[key])]
    return [*gone, *changed] or (_WHOLE if ordered else ())


def _put_back_keys(kind: Any, value: dict[Any, Any], before: list[tuple[Any, Any]], keys: Sequence[Any]) -> bool:
    wanted = dict(before)
    for key in keys:
        if key in wanted:
            kind.__setitem__(value, key, wanted[key])
        else:
            kind.pop(value, key, None)
    now = list(value)
    if len(now) == len(before) and any(a is not b for a, (b, _) in zip(now, before, strict=True)):  # another order
        kind.clear(value)
        kind.update(value, before)
    return True


def _bytes_of(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


def _state_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.RandomState):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator
    return lambda: copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state)


@contextmanager
def _own_context() -> Iterator[None]:
    """Set back context variables: what is set in a copy of the context goes with it.

    Python enters a context only to call a function; its C interface, in a context manager, too.
    """
    context = ctypes.py_object(contextvars.copy_context())
    ctypes.pythonapi.PyContext_Enter(context)
    try:
        yield
    finally:
        ctypes.pythonapi.PyContext_Exit(context)
