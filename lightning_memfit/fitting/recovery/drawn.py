"""What steps take from elsewhere: items of iterators, which are given again, and batches, which hooks may change.

An iterator can't be set back. `Replayed` stands in its place, notes what is drawn while there is a `Mark` that somebody
may go back to, and then gives the same items again before it draws others: nothing is lost, and the order stays.
"""

import functools
import operator
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_memfit.memory.oom import is_out_of_memory
from lightning_memfit.memory.state import restore_dict

_MOST_ITEMS = 1000
"""Longer containers in a drawn item are not looked into."""


# --- iterators ------------------------------------------------------------------------------------------------------


class Mark:
    """A place in what an iterator gives, to go back to.

    Args:
        notes: The iterator's.
        at: Number of the item that comes next.
    """

    __slots__ = ("__weakref__", "_at", "_notes")

    def __init__(self, notes: "_Notes", at: int) -> None:
        self._notes = notes
        self._at = at

    def go_back(self) -> None:
        """Let the iterator give again what it has given since."""
        self._notes.at = self._at


@dataclass(frozen=True, slots=True)
class _Draw:
    """What came of a draw."""

    value: Any = None
    contents: "BatchContents | None" = None
    error: Exception | None = None
    is_start: bool = False


class _Notes:
    """Draws from an iterator, and what was drawn since the oldest mark.

    Args:
        source: The iterator.
        name: Where the user finds it.
    """

    def __init__(self, source: Any, name: str) -> None:
        self.source = source
        self.at = 0
        self._name = name
        self._first = 0
        self._draws: list[_Draw] = []
        self._marks: list[weakref.ref[Mark]] = []

    @property
    def num_waiting(self) -> int:
        """Number of draws that will be given again."""
        return self._first + len(self._draws) - self.at

    def mark(self) -> Mark:
        """Return the place of the next item. What came before all marks is forgotten."""
        made = Mark(self, self.at)
        self._marks = [*(one for one in self._marks if one() is not None), weakref.ref(made)]
        oldest = min([self.at, *(mark._at for one in self._marks if (mark := one()) is not None)])
        del self._draws[: oldest - self._first]
        self._first = oldest
        return made

    def waiting(self) -> list[Any]:
        """Return the items that will be given again."""
        return [draw.value for draw in self._draws[self.at - self._first :] if draw.error is None and not draw.is_start]

    def give(self, fetch: Callable[[], Any], is_start: bool = False) -> Any:
        """Return what was drawn here before, else draw.

        Args:
            fetch: Draws from the iterator.
            is_start: Whether that starts it anew, as `iter` does with a `CombinedLoader`.

        Raises:
            MisconfigurationException: If what was drawn here can't be given again.
        """
        if self.num_waiting:
            draw = self._draws[self.at - self._first]
            if draw.is_start == is_start:
                self.at += 1
                return self._again(draw)
            if not is_start:
                raise self._refused("it was started anew in a trial step, but not in the step after it")
            del self._draws[self.at - self._first :]
        return self._fetch(fetch, is_start)

    def send(self, value: Any) -> Any:
        """Send a value into a generator, which can't be repeated."""
        if value is None:
            return self.give(lambda: next(self.source))
        words = "`send` gives it a value, and what a generator does with that can't be undone"
        if self.num_waiting:
            raise self._refused(words)
        item = self.source.send(value)
        self._note(_Draw(error=self._refused(words)))
        return item

    def _fetch(self, fetch: Callable[[], Any], is_start: bool) -> Any:
        try:
            value = fetch()
        except Exception as error:
            if is_out_of_memory(error):
                self._note(_Draw(error=self._refused(f"memory ran out inside of it ({error}), which ended it")))
            else:
                self._note(_Draw(error=error))
            raise
        if self._note(_Draw(value, is_start=is_start), fresh=True):
            self._draws[-1] = _Draw(value, None if is_start else BatchContents(value, _MOST_ITEMS), is_start=is_start)
        return value

    def _note(self, draw: _Draw, fresh: bool = False) -> bool:
        """Note a draw if somebody may go back to it; return whether."""
        self.at += 1
        if any(one() is not None for one in self._marks):
            self._draws.append(draw)
            return True
        self._first = self.at
        self._draws.clear()
        return False

    def _again(self, draw: _Draw) -> Any:
        if draw.error is not None:
            raise draw.error.with_traceback(None)
        if draw.contents is not None:
            if not draw.contents.is_unchanged:
                raise self._refused(
                    "tensors of an item were changed in place; write `item = item * 2` for `item.mul_(2)`"
                )
            draw.contents.restore()
        return draw.value

    def _refused(self, why: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"A step that draws from the iterator `{self._name}` has to be repeated, after a trial step or an "
            f"out-of-memory error, and what it drew can't be given again: {why}. Let the Trainer draw instead, from "
            "several loaders (`CombinedLoader`), or leave `MicroBatching` and `MemFit` out."
        )


class Replayed:
    """Stands in for an iterator, for `isinstance` as well, and notes what is drawn from it.

    Args:
        notes: What it draws by.
    """

    __slots__ = ("__weakref__", "_memfit_notes")

    def __init__(self, notes: _Notes) -> None:
        object.__setattr__(self, "_memfit_notes", notes)

    @property  # type: ignore[misc]
    @override
    def __class__(self) -> Any:
        return type(self._memfit_notes.source)

    def __iter__(self) -> Iterator[Any]:
        notes = self._memfit_notes
        if isinstance(notes.source, CombinedLoader):
            notes.give(functools.partial(iter, notes.source), is_start=True)
        return self

    def __next__(self) -> Any:
        notes = self._memfit_notes
        return notes.give(functools.partial(next, notes.source))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memfit_notes.source, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._memfit_notes.source, name, value)

    def __length_hint__(self) -> int:
        notes = self._memfit_notes
        hint = operator.length_hint(notes.source, -1)
        return NotImplemented if hint < 0 else hint + len(notes.waiting())

    @override
    def __repr__(self) -> str:
        return repr(self._memfit_notes.source)

    @override
    def __reduce_ex__(self, _: Any) -> Any:
        notes = self._memfit_notes
        return _joined, (notes.waiting(), notes.source)


def _joined(waiting: list[Any], source: Any) -> Any:
    """What a copy of an iterator is."""
    if not waiting:
        return source
    made = _Notes(source, "a copy")
    made._draws = [_Draw(value) for value in waiting]
    return _stand_in(made)


_FORWARDED = ("__len__", "__getitem__", "__contains__", "__call__", "__enter__", "__exit__", "__bool__")


@functools.cache
def _class_for(kind: type) -> type[Replayed]:
    """The class of what stands in for an iterator of this kind: Python looks for special methods on classes alone."""

    def forwarded(name: str) -> Any:
        return lambda self, *args: getattr(kind, name)(self._memfit_notes.source, *args)

    methods: dict[str, Any] = {name: forwarded(name) for name in _FORWARDED if hasattr(kind, name)}
    if issubclass(kind, Generator):
        methods["send"] = lambda self, value: self._memfit_notes.send(value)
    return type(Replayed.__name__, (Replayed,), {"__slots__": (), **methods})


def _stand_in(notes: _Notes) -> Replayed:
    kind: Any = type(notes.source)
    return _class_for(kind)(notes)


_known: "weakref.WeakValueDictionary[int, Replayed]" = weakref.WeakValueDictionary()
"""What stands in for iterators, by their `id`: one for all places that hold the same."""


def replayed(iterator: Any, name: str) -> Any:
    """Return what stands in for an iterator, which may have been asked for before.

    Args:
        iterator: The iterator.
        name: Where the user finds it, for messages.
    """
    found = _known.get(id(iterator))
    if found is None:
        found = _known[id(iterator)] = _stand_in(_Notes(iterator, name))
    return found


def notes_of(value: Any) -> _Notes | None:
    """Return the notes of what stands in for an iterator; None for everything else."""
    return value._memfit_notes if issubclass(type(value), Replayed) else None


def without_notes(value: Any) -> Any:
    """Return the iterator that something stands in for, unless items of it wait to be given again."""
    notes = notes_of(value)
    return value if notes is None or notes.num_waiting else notes.source


# --- batches --------------------------------------------------------------------------------------------------------


class BatchContents:
    """The containers of a batch and the versions of its tensors, which a user's code may change.

    Args:
        batch: The batch.
        most_items: Containers with more are not looked into; None: all are.
    """

    def __init__(self, batch: Any, most_items: int | None = None) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int]] = []
        self._most_items = most_items
        self._walk(batch, set())

    @property
    def is_unchanged(self) -> bool:
        """Whether all tensors hold what they held."""
        return all(_version(tensor) == version for tensor, version in self._tensors)

    def restore(self) -> None:
        """Put the items of all containers back."""
        for container, items in self._containers:
            if isinstance(container, list):
                container[:] = items
            else:
                restore_dict(container, items)

    def _walk(self, value: Any, seen: set[int]) -> None:
        if isinstance(value, Tensor):
            self._tensors.append((value, _version(value)))
            return
        if isinstance(value, (str, bytes, int, float, type(None))) or id(value) in seen:
            return
        seen.add(id(value))
        if self._most_items is not None and isinstance(value, (list, tuple, dict)) and len(value) > self._most_items:
            return
        if isinstance(value, list):
            self._containers.append((value, list(value)))
        elif isinstance(value, dict):
            self._containers.append((value, dict(value)))
        for item in _items(value):
            self._walk(item, seen)
        if not issubclass(type(value), (type, types.ModuleType, torch.nn.Module)):
            self._walk(stored(value), seen)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def stored(value: Any) -> Any:
    """The `__dict__` of any object, whatever its class does when attributes are asked for; None if it has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value
    elif type(value) is dict or isinstance(value, Mapping):
        yield from value.values()
