"""Numbers that a step may act on once in a while, and what the step does with them.

Lightning passes numbers of batches, steps and epochs. Other code counts by itself: `self.n += 1`, a buffer, a global.
`Counters` finds what changes from batch to batch in a copy and in what it shares with its module. Numbers of either
kind are then watched: a `WatchedInt` notes what it is compared with and divided by, and `AskedNumbers` says when a step
may do something else than before.
"""

import math
import operator
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from random import Random
from types import FunctionType, GeneratorType
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from typing_extensions import Self, override

from lightning_memfit.memory.wrapping import attributes_of
from lightning_memfit.profile.replaced import replaced

# --- watched numbers --------------------------------------------------------------------------------------------------

_MOST_NUMBERS = 32

_MOST_TURNS = 10_000
"""Divisors that are searched for the number that they divide."""


@dataclass
class AskedNumbers:
    """What a step did with a number, such as that of its batch."""

    thresholds: set[float] = field(default_factory=set)
    """Numbers that it was compared with."""
    remainders: set[tuple[float, float]] = field(default_factory=set)
    """`(divisor, shift)` where it matters whether `(number + shift) % divisor` is 0."""
    in_arithmetic: bool = False
    """Whether it went into other arithmetic, whose effect can't be told."""

    def __bool__(self) -> bool:
        return bool(self.thresholds or self.remainders or self.in_arithmetic)

    def telling_turns(self, value: float, step: float, last: int | None) -> list[int]:
        """After how many turns a step may do something else than before, ascending; 0 is the next one.

        Args:
            value: The number in the next turn.
            step: What every turn adds to it.
            last: The last turn of the real run, if that is known.
        """
        found = {at for threshold in self.thresholds for at in _around((threshold - value) / step)}
        for divisor, shift in self.remainders:
            found |= set(_around(_turns_until(divisor, value + shift, step)))
        if self.in_arithmetic:
            powers = {10**power for power in range(1, 7)}
            found |= powers if last is None else {last * share // 4 for share in (1, 2, 3, 4)}
        return sorted(turn for turn in found if turn >= 0 and (last is None or turn <= last))

    def telling_numbers(self, last: int | None, first: int = 0) -> list[int]:
        """Numbers at which a step may do something else than before, ascending, for a number that grows by one.

        Args:
            last: The last number of the real run, if that is known.
            first: The least number.
        """
        turns = self.telling_turns(first, 1, None if last is None else last - first)
        return [first + turn for turn in turns][:_MOST_NUMBERS]


def _around(turn: float) -> tuple[int, ...]:
    low, high = math.floor(turn), math.ceil(turn)
    return (high - 1, low, high, low + 1)


def _turns_until(divisor: float, value: float, step: float) -> float:
    """Turns until a number is divisible, that changes with every turn."""
    if isinstance(divisor, int) and float(value).is_integer() and float(step).is_integer():
        for turn in range(min(divisor, _MOST_TURNS)):
            if (value + turn * step) % divisor == 0:
                return turn
    return float((-value % divisor) / step if step > 0 else (value % divisor) / -step)


def _is_asked_by_torchs_optimizers() -> bool:
    """Whether code of torch's own optimizers or schedulers asks, in which no branch makes tensors once in a while."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("lightning_memfit.profile."):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.optim.")


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, _Watched) else value


class _Watched:
    """A number that notes what it is compared with and divided by: `(number + shift) // scale` of the one asked for."""

    asked: AskedNumbers
    shift: float
    scale: int

    @classmethod
    def of(cls, value: Any, asked: AskedNumbers, shift: float = 0, scale: int = 1) -> Self:
        """Watch a number."""
        number = cls(value)  # type: ignore[call-arg]
        number.asked, number.shift, number.scale = asked, shift, scale
        return number

    def plain(self) -> Any:
        """The number itself."""
        raise NotImplementedError

    def _compared(self, other: Any) -> None:
        if isinstance(other, _Watched):
            return  # both go on, so that there is no number at which the answer changes
        if _is_asked_by_torchs_optimizers():
            return
        if isinstance(other, (int, float)) and abs(other) < 1 << 62:
            self._note(float(other) if isinstance(other, float) else int(other))
        else:
            self.asked.in_arithmetic = True

    def _note(self, other: float) -> None:
        """Note a comparison."""
        self.asked.thresholds |= {(other + more) * self.scale - self.shift for more in (0, 1)}

    @override
    def __eq__(self, other: object) -> bool:
        self._compared(other)
        return bool(self.plain() == _plain(other))

    @override
    def __ne__(self, other: object) -> bool:
        self._compared(other)
        return bool(self.plain() != _plain(other))

    def __lt__(self, other: Any) -> Any:
        self._compared(other)
        return self.plain() < _plain(other)

    def __le__(self, other: Any) -> Any:
        self._compared(other)
        return self.plain() <= _plain(other)

    def __gt__(self, other: Any) -> Any:
        self._compared(other)
        return self.plain() > _plain(other)

    def __ge__(self, other: Any) -> Any:
        self._compared(other)
        return self.plain() >= _plain(other)

    @override
    def __hash__(self) -> int:
        return hash(self.plain())

    def __bool__(self) -> bool:
        self._compared(0)
        return bool(self.plain())

    def __add__(self, other: Any) -> Any:
        return self._moved(self.plain() + _plain(other), other)

    def __radd__(self, other: Any) -> Any:
        return self._moved(_plain(other) + self.plain(), other)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, _Watched):
            return self.plain() - other.plain()  # both go on
        return self._moved(self.plain() - other, -other if isinstance(other, (int, float)) else other)

    def _moved(self, value: Any, by: Any) -> Any:
        if (
            isinstance(by, _Watched)
            or not isinstance(by, (int, type(self.plain())))
            or type(value) is not type(self.plain())
        ):
            return self._used(value)
        return type(self).of(value, self.asked, self.shift + by * self.scale, self.scale)

    def __mod__(self, other: Any) -> Any:
        if not isinstance(other, int) or other <= 0:
            return self._used(self.plain() % other)
        divisor = int(other) * self.scale
        self.asked.remainders.add((divisor, self.shift))
        rest = self.plain() % int(other)
        kind = _IntRemainder if isinstance(self, int) else _FloatRemainder
        return kind.of_division(rest, self, divisor)

    def __floordiv__(self, other: Any) -> Any:
        if not isinstance(other, int) or other <= 0 or not isinstance(self, int):
            return self._used(self.plain() // other)
        return type(self).of(self.plain() // other, self.asked, self.shift, self.scale * int(other))

    def _used(self, value: Any) -> Any:
        # The branches of a program don't depend on what a tensor is scaled by.
        if not isinstance(value, torch.Tensor) and not _is_asked_by_torchs_optimizers():
            self.asked.in_arithmetic = True
        return value

    def __truediv__(self, other: Any) -> Any:
        return self._used(self.plain() / other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._used(other / self.plain())

    def __mul__(self, other: Any) -> Any:
        return self._used(self.plain() * other)

    def __rmul__(self, other: Any) -> Any:
        return self._used(other * self.plain())

    def __rsub__(self, other: Any) -> Any:
        return self._used(other - self.plain())

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        return self._used(pow(self.plain(), other, modulo))

    def __rpow__(self, other: Any, modulo: Any = None) -> Any:
        return self._used(pow(other, self.plain(), modulo))

    def __rmod__(self, other: Any) -> Any:
        return self._used(other % self.plain())

    def __rfloordiv__(self, other: Any) -> Any:
        return self._used(other // self.plain())

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __and__(self, other: Any) -> Any:
        return self._used(self.plain() & other)

    def __float__(self) -> float:
        self.asked.in_arithmetic = True
        return float(self.plain())

    def __deepcopy__(self, memo: Any) -> Any:
        return self.plain()

    @override
    def __reduce__(self) -> Any:
        return type(self.plain()), (self.plain(),)


class WatchedInt(_Watched, int):
    """A watched integer."""

    @override
    def plain(self) -> int:
        return int.__int__(self)


class WatchedFloat(_Watched, float):
    """A watched number that need be no integer."""

    @override
    def plain(self) -> float:
        return float.__add__(self, 0.0)

    @override
    def _note(self, other: float) -> None:
        self.asked.thresholds.add(other - self.shift)

    @override
    def __float__(self) -> float:
        return self.plain()


class _Remainder(_Watched):
    """What division of a watched number leaves, and which remainders matter."""

    divisor: int

    @classmethod
    def of_division(cls, rest: float, number: _Watched, divisor: int) -> Self:
        """Watch what a division by `divisor // scale` of the number left."""
        found = cls.of(rest, number.asked, number.shift, number.scale)
        found.divisor = divisor
        return found

    @override
    def _note(self, other: float) -> None:
        for edge in (0,) if self.scale == 1 else (0, self.scale):
            self.asked.remainders.add((self.divisor, self.shift - int(other) * self.scale - edge))

    @override
    def _moved(self, value: Any, by: Any) -> Any:
        return self._used(value)

    @override
    def __floordiv__(self, other: Any) -> Any:
        return self._used(self.plain() // other)

    @override
    def __mod__(self, other: Any) -> Any:
        return self._used(self.plain() % other)


class _IntRemainder(_Remainder, WatchedInt):
    """That of an integer."""


class _FloatRemainder(_Remainder, WatchedFloat):
    """That of another number."""


# --- tensors that count -----------------------------------------------------------------------------------------------

_NUMBER_TYPES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}

aten = torch.ops.aten

_COPIES = {aten.detach, aten.alias, aten.clone, aten._to_copy, aten.view, aten.squeeze, aten.select, aten.lift_fresh}
"""Operators whose result has the value of their argument."""

_ON_NUMBERS: dict[Any, Any] = {
    getattr(aten, name): operation
    for name, operation in (
        *((name, getattr(operator, name)) for name in ("add", "sub", "eq", "ne", "lt", "le", "gt", "ge")),
        ("add_", operator.add),
        ("sub_", operator.sub),
        ("remainder", operator.mod),
        ("floor_divide", operator.floordiv),
    )
}
"""What operators do with numbers."""

_ON_LISTS: dict[Any, Any] = {aten._foreach_add_: operator.add, aten._foreach_sub_: operator.sub}
"""What operators do with the numbers of a list."""


def may_count(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one number that nobody trains."""
    is_number = tensor.layout is torch.strided and tensor.numel() == 1 and tensor.dtype in _NUMBER_TYPES
    return is_number and not tensor.requires_grad


class TensorNumbers:
    """Watched numbers that lie in tensors with one element.

    Args:
        value_of: Gives the value of a tensor, if it is known.
    """

    def __init__(self, value_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._value_of = value_of
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], WatchedInt | WatchedFloat]] = {}

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def watch(self, tensor: torch.Tensor, number: WatchedInt | WatchedFloat) -> None:
        """Say that a tensor holds a number."""
        key = id(tensor)
        self._numbers[key] = weakref.ref(tensor, lambda _: self.forget(key)), number

    def forget(self, key: int) -> None:
        """Forget the number of the tensor with that `id`."""
        self._numbers.pop(key, None)

    def of(self, value: Any) -> WatchedInt | WatchedFloat | None:
        """The number that a tensor holds, if it is watched."""
        reference, number = self._numbers.get(id(value), (None, None))
        return number if reference is not None and reference() is value else None

    def computed(self, func: Any, args: Any, kwargs: Any) -> WatchedInt | WatchedFloat | None:
        """What an operator makes of a watched number, which notes it; None where that is no such number."""
        operation = _ON_NUMBERS.get(func._overloadpacket)
        number = self.of(args[0]) if args else None
        if number is None or func._overloadpacket in _COPIES:
            return number
        if operation is None or len(args) < 2 or kwargs.get("alpha", 1) != 1:
            return None
        return cast(WatchedInt | WatchedFloat | None, self._moved(operation, number, args[1]))

    def moved(self, func: Any, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, WatchedInt | WatchedFloat | None]]:
        """The watched numbers of a list that an operator writes to, and what it makes of them."""
        if not func._schema.is_mutable or not args or not isinstance(args[0], (list, tuple)):
            return []
        operation = _ON_LISTS.get(func._overloadpacket) if kwargs.get("alpha", 1) == 1 else None
        others = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else [*args[1:2]] * len(args[0])
        return [
            (tensor, self._moved(operation, number, other))
            for tensor, other in zip(args[0], others, strict=False)
            if (number := self.of(tensor)) is not None
        ]

    def _moved(self, operation: Any, number: WatchedInt | WatchedFloat, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            known = self._value_of(other) if other.numel() == 1 else None
            with _disable_current_modes():
                other = None if known is None else known.item()
        result = operation(number, other) if operation is not None and other is not None else None
        return result if isinstance(result, (WatchedInt, WatchedFloat)) else None

    def note_moved(self, moved: list[tuple[torch.Tensor, WatchedInt | WatchedFloat | None]]) -> None:
        """Watch what an operator has made of the numbers of a list."""
        for tensor, number in moved:
            self.forget(id(tensor)) if number is None else self.watch(tensor, number)

    def item(self, tensor: torch.Tensor) -> Any:
        """What `tensor.item()` gives."""
        number = self.of(tensor)
        return torch._C.TensorBase.item(tensor) if number is None else number


class RealCounters(TorchDispatchMode):
    """Follows numbers in real tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = TensorNumbers(lambda tensor: tensor)

    @property
    def access(self) -> "TensorAccess":
        """How to read and set them."""
        return TensorAccess(self._read, self._write)

    @staticmethod
    def _read(tensor: torch.Tensor) -> int | float | None:
        return tensor.item() if may_count(tensor) and tensor.device.type == "cpu" else None

    def _write(self, tensor: torch.Tensor, number: WatchedInt | WatchedFloat) -> None:
        with torch.no_grad():
            tensor.fill_(number.plain())
        self.counted.watch(tensor, number)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.counted:
            return func(*args, **kwargs)
        number, moved = self.counted.computed(func, args, kwargs), self.counted.moved(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            asked = self.counted.of(args[0])
            if asked is not None:  # `int(counter)`: what becomes of it can't be followed
                asked.asked.in_arithmetic = True
        result = func(*args, **kwargs)
        if func._schema.is_mutable and args:
            self.counted.forget(id(args[0]))
        self.counted.note_moved(moved)
        if number is not None and isinstance(result, torch.Tensor):
            self.counted.watch(result, number)
        return result

    @override
    def __enter__(self) -> Self:
        self._patched = replaced(torch.Tensor, "item", lambda tensor: self.counted.item(tensor))
        self._patched.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patched.__exit__(*error)


# --- counters ---------------------------------------------------------------------------------------------------------

Place = tuple[Any, Any, str]
"""A container, the key of one of its values, and the value's name."""

_Identity = tuple[int, Any]


@dataclass
class Counter:
    """A number that changes with every turn: every batch, or every epoch."""

    container: Any
    key: Any
    name: str
    value: float
    """After the turn that was looked at last."""
    step: float
    """What that turn added to it."""
    asked: AskedNumbers = field(default_factory=AskedNumbers)
    is_counting: bool = True
    """Whether the last turn changed it."""
    base: float | None = None
    """The value before the turn that later ones are counted from, if that is fixed."""
    base_turn: int = 0


@dataclass
class FakeDraws:
    """Numbers that `torch.rand` draws one at a time where tensors are fakes: all are taken to be the same."""

    share: float = 0.5
    """That number, from 0 to less than 1."""
    decided: bool = False
    """Whether something depended on one."""


@dataclass(frozen=True)
class TensorAccess:
    """How values of one-element tensors are read and set; those of fakes are known elsewhere."""

    read: Callable[[torch.Tensor], int | float | None]
    write: Callable[[torch.Tensor, Any], None]
    """Sets the value to a watched number."""
    draws: FakeDraws = field(default_factory=FakeDraws)


class Counters:
    """Finds numbers that change from turn to turn in objects, watches them, and sets them to those of later turns.

    Args:
        roots: Objects whose state belongs to a run, such as its module, callbacks and optimizers.
        outside: Gives the numbers that lie elsewhere and that a run may change.
        tensors: Access to one-element tensors; without it these are left alone.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        outside: Callable[[], Iterable[Place]] | None = None,
        tensors: TensorAccess | None = None,
    ) -> None:
        self._roots = list(roots)
        self._outside = outside
        self._tensors = tensors
        self._seen: dict[_Identity, Any] | None = None
        self.by_batch: dict[_Identity, Counter] = {}
        self.by_epoch: dict[_Identity, Counter] = {}
        self.unwatched = False
        """Whether the last turn changed a number that was not watched in it."""
        self.unsettled: tuple[str, ...] = ()
        """Names of what else the last turn changed: switches, words, generators."""

    def of_others(self, roots: Iterable[Any]) -> "Counters":
        """The same for other objects, and for nothing that lies elsewhere."""
        return Counters(roots, None, self._tensors)

    @property
    def is_noted(self) -> bool:
        """Whether there is a state to compare with."""
        return self._seen is not None

    def note(self, known: "dict[_Identity, Counter] | None" = None) -> None:
        """Note the state at hand; numbers that have changed since the last time are watched from now on.

        Args:
            known: Where counters of the turn that has ended are kept; None notes only.
        """
        before, self._seen = self._seen, {}
        self.unwatched, unsettled = False, []
        for counter in (known or {}).values():
            counter.is_counting = False
        for place, container, key, name, value in self._places():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            plain = value.plain() if isinstance(value, _Watched) else value
            self._seen[place] = plain
            if known is None or before is None or place not in before or before[place] == plain:
                if value is not plain and place not in self.by_batch and place not in self.by_epoch:
                    _write(container, key, plain, self._tensors)  # a counter's value of another time
                continue
            was = before[place]
            if not is_number or isinstance(was, (bool, str, type(None))):
                unsettled.append(name)
            elif math.isfinite(plain) and math.isfinite(was):
                self._watch(known, place, Counter(container, key, name, plain, plain - was))
        self.unsettled = tuple(dict.fromkeys(unsettled))

    def _watch(self, known: "dict[_Identity, Counter]", place: "_Identity", found: Counter) -> None:
        counter = known.get(place)
        if counter is None:
            self.unwatched = True
            counter = known[place] = found
        counter.container, counter.key = found.container, found.key
        counter.value, counter.is_counting = found.value, True
        self._set(place, counter, counter.value)

    def fix(self, known: "dict[_Identity, Counter]", turn: int) -> None:
        """Count later turns from here, for counters that are not fixed yet.

        Args:
            known: Those that count the turns.
            turn: Number of the turn that comes next.
        """
        for counter in known.values():
            if counter.base is None and counter.is_counting:
                counter.base, counter.base_turn = counter.value, turn

    def go_on(self, known: "dict[_Identity, Counter]", turn: int) -> None:
        """Set the counters to what they are before a turn.

        Args:
            known: Those that count the turns.
            turn: Number of the turn.
        """
        for place, counter in known.items():
            if counter.base is not None:
                self._set(place, counter, counter.base + (turn - counter.base_turn) * counter.step)

    def _set(self, place: "_Identity", counter: Counter, value: float) -> None:
        kind = WatchedInt if isinstance(counter.value, int) else WatchedFloat
        assert self._seen is not None
        self._seen[place] = value
        _write(counter.container, counter.key, kind.of(value, counter.asked), self._tensors)

    def telling_turns(self, known: "dict[_Identity, Counter]", last: int | None) -> set[int]:
        """Numbers of the turns in which a step may do something else.

        Args:
            known: Those that count the turns.
            last: The last turn of the real run, if that is known.
        """
        found: set[int] = set()
        for counter in known.values():
            if counter.base is not None:
                left = None if last is None else last - counter.base_turn
                turns = counter.asked.telling_turns(counter.base, counter.step, left)
                found |= {counter.base_turn + turn for turn in turns}
        return found

    def asked_names(self) -> list[str]:
        """Names of the counters that a step looked at."""
        counters = (*self.by_batch.values(), *self.by_epoch.values())
        return list(dict.fromkeys(counter.name for counter in counters if counter.asked))

    # --- finding ----------------------------------------------------------------------------------------------------

    def _places(self) -> Iterator[tuple["_Identity", Any, Any, str, Any]]:
        """Identities, containers, keys and names of numbers and switches, and their values."""
        known: set[int] = set()
        for number, root in enumerate(self._roots):
            if isinstance(root, torch.nn.Module):
                for path, child in root.named_modules():
                    for found in self._within(child, f"{path}." if path else "", 0, known):
                        yield (number, found[2]), *found
            elif isinstance(root, torch.optim.Optimizer):
                for place, container, key, name, value in self._of_optimizer(root, f"{type(root).__name__}.", known):
                    yield (number, place), container, key, name, value
            else:
                for found in self._within(root, f"{type(root).__name__}.", 0, known):
                    yield (number, found[2]), *found
        for container, key, name in self._outside() if self._outside is not None else ():
            value = _read(container, key)
            shown = _Shown(_reached(value)) if _is_plain_iterator(type(value)) else value
            yield (id(container), key), container, key, name, shown

    def _of_optimizer(
        self, optimizer: torch.optim.Optimizer, prefix: str, known: set[int]
    ) -> Iterator[tuple[Any, Any, Any, str, Any]]:
        """What an optimizer of others than torch holds: its attributes and groups, and its state of each parameter."""
        if id(optimizer) in known:
            return
        known.add(id(optimizer))
        if type(optimizer).__module__.startswith(_WITHOUT_COUNTERS):
            return
        attributes = vars(optimizer)
        for name, value in list(attributes.items()):
            if isinstance(value, torch.optim.Optimizer):  # that a wrapper steps
                yield from self._of_optimizer(value, f"{prefix}{name}.", known)
            elif name not in _of_optimizers():
                for found in self._at(attributes, name, prefix + name, value, 0, known):
                    if found[1] not in _SCHEDULED:
                        yield found[2], *found
        for parameter, state in list(optimizer.state.items()):
            if type(state) is dict:
                for key, value in list(state.items()):
                    for found in self._at(state, key, f"{prefix}state[...][{key!r}]", value, _DEPTH, known):
                        yield (id(parameter), key), *found

    def _within(self, owner: Any, prefix: str, depth: int, known: set[int]) -> Iterator[tuple[Any, Any, str, Any]]:
        attributes = attributes_of(owner)
        if type(attributes) is not dict or id(owner) in known:
            return
        known.add(id(owner))
        is_module = isinstance(owner, torch.nn.Module)
        kind: Any = type(owner)
        measured = _measured_names(kind)
        for name, value in list(attributes.items()):
            if name in measured and type(value) in _SIZED:
                yield attributes, name, prefix + name, _Shown(f"{len(value)} entries")
            if not (is_module and (name in _OF_MODULES or name in _OF_LIGHTNING)):
                yield from self._at(attributes, name, prefix + name, value, depth, known)
        if is_module and self._tensors is not None:
            buffers = attributes.get("_buffers") or {}
            for name, buffer in list(buffers.items()):
                yield from self._at(buffers, name, prefix + name, buffer, depth, known)

    def _at(
        self, container: Any, key: Any, name: str, value: Any, depth: int, known: set[int]
    ) -> Iterator[tuple[Any, Any, str, Any]]:
        kind = type(value)
        if kind in _NUMBERS or kind in _SWITCHES:
            yield container, key, name, value
        elif isinstance(value, torch.Tensor):
            if self._tensors is not None:
                number = self._tensors.read(value)
                if number is not None:
                    yield container, key, name, number
        elif _is_plain_iterator(kind):
            yield container, key, name, _Shown(_reached(value))
        elif kind in (Random, np.random.Generator):
            yield container, key, name, _Shown(_state(value))
        elif depth < _DEPTH and kind in (dict, list):
            if value and len(value) <= _MOST_ENTRIES and id(value) not in known:
                known.add(id(value))
                entries = value.items() if kind is dict else enumerate(value)
                for number, (inner, one) in enumerate(list(entries)):
                    shown = repr(inner) if type(inner) in _NAMED_KEYS else f"{type(inner).__name__} {number}"
                    yield from self._at(value, inner, f"{name}[{shown}]", one, depth + 1, known)
        elif depth < _DEPTH and not isinstance(value, _NOT_FOLLOWED) and _is_followed(kind):
            yield from self._within(value, f"{name}.", depth + 1, known)


_NOT_FOLLOWED = (torch.nn.Module, torch.optim.Optimizer, type)

_DEPTH = 3
_MOST_ENTRIES = 256

_NUMBERS = frozenset((int, float, WatchedInt, WatchedFloat, _IntRemainder, _FloatRemainder))
_SWITCHES = frozenset((bool, str, type(None)))

_OF_MODULES = frozenset(vars(torch.nn.Module()))

_OF_LIGHTNING = frozenset(("_trainer", "_fabric", "_current_fx_name", "_log_hyperparams", "_hparams", "_apply"))


_NAMED_KEYS = (str, int, bool, float, tuple, type(None))

_WITHOUT_COUNTERS = ("torch.", "lightning_memfit.", "bitsandbytes.", "transformers.")
"""Packages whose optimizers do the same in every step, but for the first."""


@cache
def _of_optimizers() -> frozenset[str]:
    """Attributes of every optimizer. Asked for late: the first optimizer of a process imports `torch._dynamo` (1 s)."""
    of_any = {*vars(torch.optim.SGD([torch.zeros(0)], lr=0.1)), "_opt_called", "_step_count"}
    return frozenset(of_any - {"param_groups"})


_SCHEDULED = ("lr", "initial_lr", "momentum", "betas")
"""What schedulers set in groups."""


class _Shown(str):
    """The state of an object in words."""

    __slots__ = ()


_SIZED = (list, deque, dict, set)

_OUTSIDE_OF_STEPS = ("validation", "test", "predict", "on_validation", "on_test", "on_predict", "on_train_epoch_end")


@lru_cache(1024)
def _measured_names(kind: Any) -> frozenset[str]:
    """Attributes that methods of the user's, which may run in a step, name together with `len`."""
    from lightning_memfit.profile.reads import is_users_module, names_in

    methods = [
        one
        for base in kind.__mro__
        if is_users_module(base.__module__)
        for one in vars(base).values()
        if isinstance(one, FunctionType) and not one.__name__.startswith(_OUTSIDE_OF_STEPS)
    ]
    named = [names_in(method.__code__) for method in methods]
    return frozenset(name for names in named if "len" in names.globals for name in names.attributes)


def _is_plain_iterator(kind: type) -> bool:
    """Whether it is an iterator of Python's that tells how far it is: no generator, and no file."""
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__") and kind is not GeneratorType


def _reached(iterator: Any) -> str:
    """How far an iterator of Python's is, in words."""
    left = operator.length_hint(iterator, -1)
    if left >= 0:
        return f"{left} left"
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")  # Python will not copy those of itertools for ever
        return _reached_within(iterator.__reduce__())
    return ""


def _reached_within(state: Any) -> str:
    if isinstance(state, tuple):
        return " ".join(map(_reached_within, state))
    if isinstance(state, (int, float)):
        return str(state)
    return _reached(state) if _is_plain_iterator(type(state)) else ""


def _state(generator: Any) -> str:
    state = generator.getstate() if isinstance(generator, Random) else generator.bit_generator.state
    return repr(state)


def _is_followed(kind: type) -> bool:
    """Whether objects of a class may hold numbers of the user's."""
    from lightning_memfit.profile.reads import is_users_module

    return kind.__module__ == "types" or (kind is not deque and is_users_module(kind.__module__))


def _read(container: Any, key: Any) -> Any:
    if isinstance(container, type):
        return vars(container).get(key)
    if isinstance(container, dict):
        return container.get(key)
    try:
        return container.cell_contents if key is None else container[key]
    except (ValueError, LookupError):
        return None


def _write(container: Any, key: Any, number: Any, tensors: TensorAccess | None) -> None:
    """Set a number, where there still is one."""
    if isinstance(container, type):
        type.__setattr__(container, key, number)
    elif key is None and not isinstance(container, dict):
        container.cell_contents = number
    elif isinstance(container[key], torch.Tensor):
        if tensors is not None:
            tensors.write(container[key], number)
    else:
        container[key] = number
