"""`RealIntegers`: the real values of small integer and boolean tensors, carried along with their fakes.

Ids, masks and positions steer control flow (`mask.all()`, `lengths.max().item()`, boolean indexing). With their real
values the traced step follows the branch the real batch would take. A value computed from floats is unknown in a trace:
it gets an assumed one, and the assumption is recorded.
"""

import operator
import os
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_memfit.memory.ledger import tensors_among
from lightning_memfit.profile.culprit import calling_line, running_frames
from lightning_memfit.profile.fake import must_be_strided
from lightning_memfit.profile.fake_mode import Uncompiled

aten = torch.ops.aten

_INTEGER_TYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_VALUE_SIZED = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
_FINITE = {aten.isnan.default, aten.isinf.default, aten.eq.Tensor, aten.ne.Scalar}
_DRAWN = {aten.rand.default, aten.rand.generator, aten.rand_like.default}
_LEAST_DRAWN, _ASSUMED_DRAW, _MOST_DRAWN = 0.0, 0.5, 1 - 2**-53
"""Between what the results of these operators lie, and what they are taken to be."""
_COMPARISONS = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
}
_MAX_INTEGERS = 1 << 22
"""Larger integer tensors lose their values."""
_MAX_FLOATS = 1 << 20
"""Floats computed from integers alone (`lengths.float().mean()`) or constant are carried up to this many."""
_FILLED = {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full}
"""Factories whose result depends on a tensor's shape and not on its values."""

_LARGEST = {aten.topk.default: 1, aten.max.dim: 1, aten.argmax.default: None}
"""Operators that tell where the largest values lie, and which of their results does; None is the only one."""

_WITHOUT_VALUES = {aten.empty, aten.randint, aten.empty_like, aten.empty_strided}

_FINITE_FLOATS = "floating-point values were taken to be finite"
_OF_BATCH = "the batch"
_DRAWN_NUMBER = "a number that was drawn"
_NOT_ROUTINGS = {_FINITE_FLOATS, _OF_BATCH, _DRAWN_NUMBER}


@dataclass(frozen=True)
class AssumedValues:
    """What a trace answers when a program asks for a value that only real data could tell."""

    floating: float = 1.0
    boolean: bool = False
    integer: int = 1
    all_distinct: bool = True
    """Whether elements that are counted by their values all differ; else they are all alike."""

    def of(self, dtype: torch.dtype) -> float | bool | int:
        """The assumed value of a dtype."""
        if dtype.is_floating_point:
            return self.floating
        return self.boolean if dtype is torch.bool else self.integer


_MOST_READS = 1000
"""How often a line may read unknown values: a loop that goes on while it gets the same answer never ends."""


_SAME = (aten.equal.default, aten.allclose.default)

_ONLY_SCALING = (os.path.join("torch", "optim", "_adafactor.py"),)
"""Code that reads values to scale by them. Noted, each of Adafactor's steps would be traced four times."""


@dataclass(frozen=True)
class _Known:
    """Values of a fake tensor, and what they rest on."""

    fake: weakref.ref[torch.Tensor]
    storage: int
    values: torch.Tensor
    basis: frozenset[str]
    """Some of `_NOT_ROUTINGS`, and routings in words."""


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@cache
def _is_plain(func: Any) -> bool:
    """Whether an operator on tensors without values gives tensors without values, and does nothing else."""
    special = {*_VALUE_SIZED, *_FINITE, *_LARGEST, *_SAME}
    is_factory = func._overloadpacket in _FILLED or not _takes_tensors(func)
    return not (func in special or is_factory or func._overloadpacket is aten.index or func._schema.is_mutable)


@cache
def _takes_tensors(func: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in func._schema.arguments)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (_MAX_INTEGERS if tensor.dtype in _INTEGER_TYPES else _MAX_FLOATS)


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by name, with the defaults of those left out."""
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class UnknownSizeError(RuntimeError):
    """The size of a tensor depends on values that a trace doesn't have."""


_COUNTER_TYPES = _INTEGER_TYPES - {torch.bool} | {torch.float32, torch.float64}


def counter_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy on the CPU of a tensor with one element that nobody trains, in which a module may count; else None."""
    # A module whose sizes are predicted in the middle of training is a fake clone itself.
    is_real = tensor.device.type != "meta" and not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided
    if not is_real or tensor.numel() != 1 or tensor.dtype not in _COUNTER_TYPES or tensor.requires_grad:
        return None
    with _disable_current_modes():
        return tensor.detach().cpu().clone()


class RealIntegers(Uncompiled, TorchDispatchMode):
    """Compute real integers along with the fakes of a mode."""

    def __init__(self, fake_mode: FakeTensorMode, assumed: AssumedValues | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode
        self.assumed = assumed or AssumedValues()
        self.assumptions: list[str] = []
        self.taken: list[str] = []
        """Assumptions to which there is no second choice."""
        self._reads: Counter[str] = Counter()
        """How often each line of the user's has got an assumed value."""
        self.draw_decided = False
        """Whether something depended on a single number that was drawn."""
        self._values: dict[int, _Known] = {}
        self._in_storage: dict[int, set[int]] = {}
        """Which of them lie in a storage."""

    # --- what is known ----------------------------------------------------------------------------------------------

    def attach(self, fake: torch.Tensor, real: torch.Tensor, basis: frozenset[str] = frozenset()) -> torch.Tensor:
        """Remember the values of a fake tensor, and what they rest on."""
        key, storage = id(fake), _storage_of(fake)
        self._forget(key)
        self._values[key] = _Known(weakref.ref(fake, lambda _: self._forget(key)), storage, real, basis)
        self._in_storage.setdefault(storage, set()).add(key)
        return fake

    def _forget(self, key: int) -> None:
        known = self._values.pop(key, None)
        if known is not None:
            keys = self._in_storage[known.storage]
            keys.discard(key)
            if not keys:
                del self._in_storage[known.storage]

    def remember_counter(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Remember the value of a tensor of a module with one element, in which it may count."""
        must_be_strided(real)
        value = counter_of(real)
        if value is not None:
            with _disable_current_modes():
                self.attach(fake, value.to(fake.dtype))

    def remember_batch(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Remember the integers of a tensor of the batch."""
        must_be_strided(real)
        if real.dtype in _INTEGER_TYPES and real.device.type != "meta":
            with _disable_current_modes():
                self.attach(fake, real.detach().cpu().clone(), frozenset({_OF_BATCH}))  # the step may write to it

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Real values of a fake tensor, if known; for a real tensor, such as a literal, a copy of it."""
        if not isinstance(tensor, FakeTensor):
            if hasattr(tensor, "__tensor_flatten__"):  # such as a quantized state, which may be made of fakes
                return None
            known = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() <= _MAX_FLOATS
            with _disable_current_modes():
                return tensor.detach().clone() if known else None
        entry = self._values.get(id(tensor))
        return None if entry is None else entry.values

    def _may_be_known(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._values or not (
            isinstance(tensor, FakeTensor) or hasattr(tensor, "__tensor_flatten__")
        )

    def _basis_of(self, tensors: list[torch.Tensor]) -> frozenset[str]:
        """What the values of tensors rest on."""
        known = (self._values.get(id(tensor)) for tensor in tensors)
        return frozenset[str]().union(*(entry.basis for entry in known if entry is not None))

    def _decide(self, tensors: list[torch.Tensor]) -> bool:
        """Note what the values of tensors rest on, as they decide something. False if they must not.

        Assumed places that are compared with the batch's values (predictions with labels) tell nothing about how many
        are alike.
        """
        basis = self._basis_of(tensors)
        routings = basis - _NOT_ROUTINGS
        if routings and _OF_BATCH in basis:
            return False
        self.draw_decided |= _DRAWN_NUMBER in basis
        if _FINITE_FLOATS in basis:
            self.assumptions.append(_FINITE_FLOATS)
        self.taken += sorted(routings)
        return True

    # --- what Python reads ------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> Any:
        """NumPy array of a fake tensor's values if they are known, otherwise of assumed ones."""
        value = self.value_of(tensor)
        with _disable_current_modes():
            if value is None or not self._decide([tensor]):
                answer = self._assume(tensor.dtype, f"{tensor.numel()} unknown {_name(tensor.dtype)} values were")
                value = torch.full(tuple(tensor.shape), answer, dtype=tensor.dtype)
            return value.detach().cpu().numpy().copy()

    def _item(self, func: Any, tensor: torch.Tensor) -> Any:
        value = self.value_of(tensor)
        if value is not None and self._decide([tensor]):
            with _disable_current_modes():
                return value.item()
        try:
            return func(tensor)  # constants that the fake mode knows itself
        except DataDependentOutputException:
            return self._assume(tensor.dtype, f"an unknown {_name(tensor.dtype)} value was")

    def _assume(self, dtype: torch.dtype, read: str) -> float | bool | int:
        """The assumed value, which is noted, unless an optimizer scales by it, on which memory does not depend."""
        answer = self.assumed.of(dtype)
        if any(frame.f_code.co_filename.endswith(_ONLY_SCALING) for frame in running_frames()):
            return answer
        line = calling_line()
        self._reads[line] += 1
        if line and self._reads[line] > _MOST_READS:
            raise UnknownSizeError(
                f"a loop goes on for ever while an unknown {_name(dtype)} value is read as {answer}{line}, and how "
                "often it turns only real data can tell"
            )
        self.assumptions.append(f"{read} read as {answer}{line}")
        return answer

    # --- what operators make ----------------------------------------------------------------------------------------

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._item(func, args[0])
        if func is aten._pack_padded_sequence.default and (lengths := self.value_of(args[1])) is not None:
            return self._packed(args[0], lengths, args[2])
        tensors = list(tensors_among((*args, *kwargs.values())))
        if _is_plain(func) and not any(map(self._may_be_known, tensors)):
            return func(*args, **kwargs)
        if func in _VALUE_SIZED or func in _SAME:
            real = self._real_result(func, args, kwargs, tensors)
            real = real if real is not None and self._decide(tensors) else None
            if func in _SAME:
                return self._equal(args[0], args[1]) if real is None else real
            return self._value_sized(func, args, kwargs, real, self._basis_of(tensors))
        if func._overloadpacket is aten.index and tensors:
            args = (args[0], self._integer_indices(args[1]))
            tensors = list(tensors_among(args))
        result = func(*args, **kwargs)
        real = None
        if func._schema.is_mutable or not self._are_too_large(result):
            real = self._real_result(func, args, kwargs, tensors)
        if real is not None:
            self._attach_all(result, real, self._basis_of_result(func, args, tensors))
        elif func in _FINITE and (finite := self._taken_finite(func, args)) is not None:
            self.attach(result, finite, frozenset({_FINITE_FLOATS}))
        elif func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        elif func in _LARGEST:
            self._assume_places(func, args, kwargs, result)
        elif func in _DRAWN and result.numel() == 1:
            with _disable_current_modes():
                drawn = torch.full(tuple(result.shape), _ASSUMED_DRAW, dtype=result.dtype)
            self.attach(result, drawn, frozenset({_DRAWN_NUMBER}))
        return result

    def _basis_of_result(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> frozenset[str]:
        """What the values of a result rest on."""
        basis = self._basis_of(tensors) if func._overloadpacket not in _FILLED else frozenset()
        if func in _COMPARISONS and basis == {_DRAWN_NUMBER}:
            # Models that leave layers out with some probability (`layerdrop`) draw and compare where that is 0, too.
            is_same = _COMPARISONS[func](_LEAST_DRAWN, args[1]) == _COMPARISONS[func](_MOST_DRAWN, args[1])
            return frozenset() if is_same else basis
        return basis

    def _real_result(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """What an operator makes of real values; None if some aren't known."""
        packet = func._overloadpacket
        if packet in _WITHOUT_VALUES or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if not tensors and _takes_tensors(func):
            return None
        values: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            value = self.value_of(tensor)
            if packet in _FILLED:
                with _disable_current_modes():
                    value = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            if value is None:
                return None
            values[id(tensor)] = value
        is_of_draw = _DRAWN_NUMBER in self._basis_of(tensors) and any(one.is_floating_point() for one in tensors)
        if is_of_draw and func not in _COMPARISONS and packet not in _FILLED:
            return None  # between what other results lie isn't known

        def substitute(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return values[id(value)]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        with _disable_current_modes(), torch.no_grad():
            try:
                result = func(*tree_map(substitute, args), **tree_map(substitute, kwargs))
                return result if func._schema.returns else ()  # an operator on lists only writes to them
            except (RuntimeError, NotImplementedError):
                return None

    def _are_too_large(self, result: Any) -> bool:
        """Whether the values of all results are more than are carried."""
        made = list(tensors_among((result,)))
        return bool(made) and not any(map(_is_small, made))

    def _attach_all(self, result: Any, real: Any, basis: frozenset[str]) -> None:
        fakes, values = tree_leaves(result), tree_leaves(real)
        if len(fakes) != len(values):
            return
        for fake, value in zip(fakes, values, strict=True):
            if not (isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor)):
                continue
            if _is_small(value) and fake.shape == value.shape:
                self.attach(fake, value, basis)

    def _new(self, real: torch.Tensor, basis: frozenset[str] = frozenset()) -> torch.Tensor:
        """A new fake of known values."""
        with _disable_current_modes(), self.fake_mode:
            fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="cpu")
        return self.attach(fake, real, basis)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of tensors that unknown ones were written to, and of their views."""
        given = _by_name(func, args, kwargs)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_among((given.get(argument.name),)):
                    for key in (id(tensor), *self._in_storage.get(_storage_of(tensor), ())):
                        self._forget(key)

    # --- what is assumed of unknown values --------------------------------------------------------------------------

    def _taken_finite(self, func: Any, args: Any) -> torch.Tensor | None:
        """Answer of `isnan`, `isinf` and the operators that make up `isfinite`, for the finite values of training."""
        tensor = args[0]
        if tensor.numel() > _MAX_INTEGERS or not tensor.is_floating_point():
            return None
        if func is aten.eq.Tensor and args[1] is not tensor:
            return None
        if func is aten.ne.Scalar and args[1] != float("inf"):
            return None
        with _disable_current_modes():
            return torch.full(tuple(tensor.shape), func in (aten.eq.Tensor, aten.ne.Scalar))

    def _packed(self, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, ...]:
        """A packed sequence of the real lengths. Its batch sizes are real, as recurrences read them past operators."""
        with _disable_current_modes():
            one_wide = torch.empty((*padded.shape[:2], 1))
            data, batch_sizes = torch._pack_padded_sequence(one_wide, lengths, batch_first)
        return padded.new_empty((len(data), *padded.shape[2:])), batch_sizes

    def _equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether two tensors, whose values aren't known, are equal: only if they are the same."""
        if first is second or first.shape != second.shape:
            return first is second
        self.taken.append("different tensors of unknown values were taken to differ")
        return False

    def _assume_places(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the places of the largest of unknown values assumed ones: spread evenly, as a router's training aims at.

        Sizes inside a mixture of experts depend on how many tokens each expert gets, while their sum does not.
        """
        given = _by_name(func, args, kwargs)
        scores, dim = given["self"], given["dim"]
        which = _LARGEST[func]
        places = result if which is None else result[which]
        if not scores.numel() or places.numel() > _MAX_INTEGERS:
            return
        count = given.get("k", 1)
        shape = list(scores.shape) if scores.dim() and dim is not None else [scores.numel()]
        choices = shape.pop(dim or 0)
        rows = scores.numel() // choices
        words = (
            f"the top {count} of {choices} unknown scores in {rows} rows (tokens to experts, say) were taken to be "
            "spread evenly"
        )
        with _disable_current_modes():
            found = (torch.arange(rows * count) % choices).reshape(*shape, count).movedim(-1, dim or 0)
            found = found.reshape(tuple(places.shape)).contiguous()
        self.attach(places, found, frozenset({words}))

    def _value_sized(self, func: Any, args: Any, kwargs: Any, real: Any, basis: frozenset[str]) -> Any:
        if real is not None:
            return tree_map(lambda value: self._new(value, basis), real)
        if func is aten.bincount.default:
            return self._unknown_counts(*args, **kwargs)
        if func is aten._unique2.default:
            return self._unknown_distinct(args[0])
        raise UnknownSizeError(f"the output size of {func} depends on the values of floating-point tensors")

    def _unknown_distinct(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Distinct values of a tensor without values, as many as there can be; or one value."""
        size = tensor.numel()
        most = 2 if tensor.dtype is torch.bool else 1 << min(62, 8 * tensor.element_size())
        count = min(size, most if self.assumed.all_distinct else 1)
        words = f"the {size} unknown elements of a tensor were taken to have {count} distinct value{'s' * (count != 1)}"
        self.taken.append(words)
        with _disable_current_modes():
            inverse = (torch.arange(size) % max(1, count)).reshape(tensor.shape)
            counts = torch.bincount(inverse.flatten(), minlength=count)
        with self.fake_mode:
            values = torch.empty(count, dtype=tensor.dtype, device="cpu")
        return values, self._new(inverse), self._new(counts)

    def _unknown_counts(self, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
        """Counts of unknown values, taken to be below `minlength` if the caller gave one, as torchmetrics does."""
        if not minlength:
            raise UnknownSizeError("the length of torch.bincount without `minlength` depends on unknown values")
        self.assumptions.append(
            f"{tensor.numel()} unknown counted values were taken to lie below `minlength={minlength}`"
        )
        with self.fake_mode:
            return torch.empty(minlength, dtype=torch.int64 if weights is None else weights.dtype, device="cpu")

    def _integer_indices(self, indices: Any) -> Any:
        """Replace boolean masks, whose result size depends on values, by the integer indices they select."""
        converted: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                converted.append(index)
                continue
            value = self.value_of(index)
            if value is None or not self._decide([index]):
                raise UnknownSizeError("a boolean index computed from floating-point tensors has a data-dependent size")
            with _disable_current_modes():
                places = value.nonzero(as_tuple=True)
            converted += [self._new(place, self._basis_of([index])) for place in places]
        return converted
