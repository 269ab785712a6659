"""`RealIntegers`: the real values of small integer and boolean tensors, carried along with their fakes.

Ids, masks and positions steer control flow (`mask.all()`, `lengths.max().item()`, boolean indexing). With their real
values the traced step follows the branch the real batch would take. A value computed from floats is unknown in a trace:
it gets an assumed one, and the assumption is recorded.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_memfit.memory.ledger import tensors_among
from lightning_memfit.profile.culprit import RunningLoop, calling_line, is_read_by_user, running_while
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
"""Operators whose results are drawn from 0 to less than 1."""
_BOUNDS: dict[Any, tuple[Callable[[float], bool], Callable[[float], bool]]] = {
    aten.lt.Scalar: (lambda bound: bound <= 0, lambda bound: bound >= 1),
    aten.ge.Scalar: (lambda bound: bound >= 1, lambda bound: bound <= 0),
    aten.le.Scalar: (lambda bound: bound < 0, lambda bound: bound >= 1),
    aten.gt.Scalar: (lambda bound: bound >= 1, lambda bound: bound < 0),
}
"""For which numbers a comparison of such a result with one is false whatever was drawn, and for which it is true.

Models that leave layers out with some probability (`layerdrop`) draw and compare where that is 0, too."""
_MAX_FLOATS = 1 << 20
"""Floats computed from integers alone (`lengths.float().mean()`) or constant are carried up to this many."""
_LIKE = {aten.zeros_like, aten.ones_like, aten.full_like}
_FILLED = {*_LIKE, aten.new_zeros, aten.new_ones, aten.new_full}
"""Factories whose result depends on a tensor's shape and not on its values."""
_FILLED_FACTORIES = {*_FILLED, aten.zeros, aten.ones, aten.full}

_LARGEST = {aten.topk.default: 1, aten.max.dim: 1, aten.argmax.default: None}
"""Operators that tell where the largest values lie, and which of their results does; None is the only one."""

_WITHOUT_VALUES = {aten.empty, aten.randint, aten.empty_like, aten.empty_strided}

Routing = Literal["even", "most", "first", "last"]

ROUTINGS: dict[Routing, str] = {
    "even": "spread evenly",
    "most": "nearly all at the first ones, with some at each",
    "first": "all at the first ones",
    "last": "all at the last ones",
}
"""Where the largest of unknown values are taken to lie, in words."""

_FINITE_FLOATS = "floating-point values were taken to be finite"
_OF_BATCH = "the batch"
_DRAW = "a number that was drawn"


@dataclass(frozen=True)
class AssumedValues:
    """What a trace answers when a program asks for a value that only real data could tell."""

    floating: float = 1.0
    boolean: bool = False
    integer: int = 1
    routing: Routing = "even"
    all_distinct: bool = True
    """Whether elements that are counted by their values all differ; else they are all alike."""
    loop_turns: int | None = None
    """After how often a `while` loop gets other answers than this, until it ends; None is never."""

    def of(self, dtype: torch.dtype) -> float | bool | int:
        """The assumed value of a dtype."""
        if dtype.is_floating_point:
            return self.floating
        return self.boolean if dtype is torch.bool else self.integer

    draw: float = 0.5
    """What every single number is that `torch.rand` draws, from 0 to less than 1."""
    first_in_loops: bool | None = None
    """What booleans are in the first turns of a `while` loop, if something else."""

    def in_turn(self, dtype: torch.dtype, turn: int) -> float | bool | int:
        """The assumed value in a turn of a loop, which begin with 1."""
        if dtype is torch.bool and self.first_in_loops is not None and turn <= _FIRST_TURNS:
            return self.first_in_loops
        return self.of(dtype)

    def ending(self, dtype: torch.dtype, turn: int) -> float | bool | int:
        """Another value, which may end a loop that goes on with the assumed one."""
        if dtype is torch.bool:
            return self.boolean == bool(turn % 2)
        values: tuple[float, ...] = _ENDINGS if dtype.is_floating_point else tuple(map(round, _ENDINGS))
        return values[turn % len(values)]

    def places(self, rows: int, count: int, choices: int) -> torch.Tensor:
        """Assumed places of the `count` largest of `choices` values in each row, all different in a row."""
        order = torch.arange(count).expand(rows, count)
        spread = (torch.arange(rows)[:, None] * count + order) % choices
        if self.routing == "even":
            return spread
        if self.routing == "most":
            return torch.where(torch.arange(rows)[:, None] * count < choices, spread, order)
        return order if self.routing == "first" else choices - 1 - order


_ENDINGS = (1e6, -1e6, 1e-6, 1.0)
"""Values on either side of the thresholds that loops compare with."""

_FIRST_TURNS = 3

_MOST_TURNS, _MOST_READS = 200, 20_000
"""Values that may be assumed in one `while` loop: one for each turn, or more of them where other loops run in it."""


@dataclass(frozen=True)
class _Known:
    """Values of a fake tensor, and what they rest on."""

    fake: weakref.ref[torch.Tensor]
    storage: int
    values: torch.Tensor
    basis: frozenset[str]
    """`_FINITE_FLOATS`, `_OF_BATCH`, `_DRAW`, and routings in words."""


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@cache
def _is_plain(func: Any) -> bool:
    """Whether an operator on tensors without values gives tensors without values, and does nothing else."""
    packet = func._overloadpacket
    special = {*_VALUE_SIZED, *_FINITE, *_LARGEST, aten.equal.default}
    is_factory = packet in {*_FILLED, *_WITHOUT_VALUES} or not _takes_tensors(func)
    return not (func in special or is_factory or packet is aten.index or func._schema.is_mutable)


@cache
def _takes_tensors(func: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in func._schema.arguments)


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by name, with the defaults of those left out."""
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def _filled_elements(packet: Any, args: Any) -> int:
    """Elements of what a factory fills with one value."""
    if packet in _LIKE:
        return int(args[0].numel())
    if packet in _FILLED:
        return math.prod(args[1])
    return math.prod(args[0])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_NUMBER_TYPES = _INTEGER_TYPES - {torch.bool} | {torch.float32, torch.float64}


def _may_count(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one number that nobody trains."""
    is_number = tensor.layout is torch.strided and tensor.numel() == 1 and tensor.dtype in _NUMBER_TYPES
    return is_number and not tensor.requires_grad


class UnknownSizeError(RuntimeError):
    """The size of a tensor depends on values that a trace doesn't have."""


class EndlessError(RuntimeError):
    """A loop goes on as long as it gets the assumed value."""


def counter_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy on the CPU of a tensor with one element, in which a module may count; None of any other."""
    # A module whose sizes are predicted in the middle of training is a fake clone itself.
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor) or not _may_count(tensor):
        return None
    with _disable_current_modes():
        return tensor.detach().cpu().clone()


class RealIntegers(Uncompiled, TorchDispatchMode):
    """Compute real integers along with their fakes.

    Args:
        fake_mode: Mode of the fakes.
        max_elements: Larger integer tensors lose their values.
        assumed: What `.item()` answers for unknown values.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, assumed: "AssumedValues | None" = None, max_elements: int = 1 << 22
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode
        self.max_elements = max_elements
        self.assumed = assumed or AssumedValues()
        self.assumptions: list[str] = []
        self.taken: list[str] = []
        """Assumptions to which there is no second choice."""
        self._loop: RunningLoop | None = None
        """The loop in which the last value was assumed."""
        self._loop_reads: Counter[int] = Counter()
        """How often each of its lines has got one."""
        self.conditions: list[str] = []
        """Branches of the user's on values of the batch, in words."""
        self.took_distinct = False
        """Whether unknown elements were taken to differ."""
        self.gave_addresses = False
        """Whether the step asked for the address of a fake tensor, which is no number."""
        self.routings: list[str] = []
        """Assumed places of largest values that decided something, in words."""
        self._values: dict[int, _Known] = {}
        self._in_storage: dict[int, set[int]] = {}
        """Which of them lie in a storage."""
        self.draw_decided = False
        """Whether something depended on a single number that was drawn."""
        self._drawn: dict[int, weakref.ref[torch.Tensor]] = {}
        """Fake tensors of numbers that were drawn from 0 to less than 1."""

    def attach(self, fake: torch.Tensor, real: torch.Tensor, basis: frozenset[str] = frozenset()) -> torch.Tensor:
        """Remember the values of a fake tensor, and what they rest on."""
        key, storage = id(fake), _storage_of(fake)

        def forget(_: Any) -> None:
            self._forget(key)

        self._forget(key)
        self._values[key] = _Known(weakref.ref(fake, forget), storage, real, basis)
        self._in_storage.setdefault(storage, set()).add(key)
        return fake

    # --- counters ---------------------------------------------------------------------------------------------------

    def remember_counter(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Remember the value of a copied tensor with one element, in which a module may count.

        Raises:
            NotImplementedError: If the tensor isn't strided: the fake stands for another kind of memory.
        """
        must_be_strided(real)
        value = counter_of(real)
        if value is not None:
            with _disable_current_modes():
                self.attach(fake, value.to(fake.dtype))

    def _forget(self, key: int) -> None:
        known = self._values.pop(key, None)
        if known is not None:
            keys = self._in_storage[known.storage]
            keys.discard(key)
            if not keys:
                del self._in_storage[known.storage]

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Real values of a fake tensor, if known; for a real tensor, such as a literal, a copy of it.

        A tensor that is made of others, such as a quantized state, may be made of fakes: its values aren't known.
        """
        if not isinstance(tensor, FakeTensor):
            if is_traceable_wrapper_subclass(tensor):
                return None
            known = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() <= _MAX_FLOATS
            with _disable_current_modes():
                return tensor.detach().clone() if known else None
        entry = self._values.get(id(tensor))
        return entry.values if entry is not None and entry.fake() is tensor else None

    def _may_be_known(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._values or id(tensor) in self._drawn:
            return True
        return not (isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor))

    def _is_drawn(self, tensor: Any) -> bool:
        known = self._drawn.get(id(tensor))
        return known is not None and known() is tensor

    def _basis_of(self, tensor: torch.Tensor) -> frozenset[str]:
        entry = self._values.get(id(tensor))
        return entry.basis if entry is not None and entry.fake() is tensor else frozenset()

    def _joined_basis(self, tensors: list[torch.Tensor]) -> frozenset[str]:
        return frozenset[str]().union(*map(self._basis_of, tensors))

    def _decide(self, tensors: list[torch.Tensor]) -> bool:
        """Note what the values of tensors rest on, as they decide something. False if they must not.

        Assumed places that are compared with the batch's values (predictions with labels) tell nothing about how many
        are alike.
        """
        basis = self._joined_basis(tensors)
        routings = basis - {_FINITE_FLOATS, _OF_BATCH, _DRAW}
        if routings and _OF_BATCH in basis:
            return False
        self.draw_decided |= _DRAW in basis
        if _FINITE_FLOATS in basis:
            self.assumptions.append(_FINITE_FLOATS)
        self.routings += sorted(routings)
        return True

    def remember_batch(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Remember the integers of a tensor of the batch.

        Raises:
            NotImplementedError: If the tensor isn't strided.
        """
        must_be_strided(real)
        if real.dtype in _INTEGER_TYPES and real.device.type != "meta":
            with _disable_current_modes():
                self.attach(fake, real.detach().cpu().clone(), frozenset({_OF_BATCH}))  # the step may write to it

    def read(self, tensor: torch.Tensor) -> Any:
        """NumPy array of a fake tensor's values if they are known, otherwise of assumed ones."""
        value = self.value_of(tensor)
        with _disable_current_modes():
            if value is not None and self._decide([tensor]):
                return value.detach().cpu().numpy().copy()
            answer = self._answer(tensor.dtype)
            self.assumptions.append(
                f"{tensor.numel()} unknown {_name(tensor.dtype)} values were read as {answer}{calling_line()}"
            )
            return torch.full(tuple(tensor.shape), answer, dtype=tensor.dtype).numpy()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._item(func, args[0])
        tensors = list(tensors_among((*args, *kwargs.values())))
        if _is_plain(func) and not any(map(self._may_be_known, tensors)):
            return func(*args, **kwargs)
        real = self._real_result(func, args, kwargs, tensors)
        basis = self._joined_basis(tensors) if func._overloadpacket not in _FILLED else frozenset()
        if real is None and func in _FINITE:
            real, basis = self._taken_finite(func, args), frozenset({_FINITE_FLOATS})
        if real is None and func in _BOUNDS and self._is_drawn(args[0]):
            real, basis = self._compared(func, *args)
        if func is aten.equal.default:
            if isinstance(real, bool) and self._decide(tensors):
                return real
            if real is None:
                return self._equal(*args)
        if func in _VALUE_SIZED:
            known = real is not None and self._decide(tensors)
            return self._value_sized(func, args, kwargs, real if known else None, basis)
        if func._overloadpacket is aten.index and tensors:
            args = (args[0], self._integer_indices(args[1]))
        result = func(*args, **kwargs)
        if real is not None:
            self._attach_all(result, real, basis)
        elif func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        elif func in _LARGEST:
            self._assume_places(func, args, kwargs, result)
        elif func in _DRAWN:
            key = id(result)
            self._drawn[key] = weakref.ref(result, lambda _: self._drawn.pop(key, None))
        return result

    def _equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether two tensors, whose values aren't known, are equal: only if they are the same."""
        if first is second or first.shape != second.shape:
            return first is second
        self.taken.append("different tensors of unknown values were taken to differ")
        return False

    def _assume_places(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the places of the largest of unknown values assumed ones."""
        given = _by_name(func, args, kwargs)
        scores, dim = given["self"], given["dim"]
        which = _LARGEST[func]
        places = result if which is None else result[which]
        if not scores.numel() or places.numel() > self.max_elements:
            return
        count = given.get("k", 1)
        shape = list(scores.shape) if scores.dim() and dim is not None else [scores.numel()]
        choices = shape.pop(dim or 0)
        rows = scores.numel() // choices
        words = f"the top {count} of {choices} unknown scores in {rows} rows (tokens to experts, say) were taken to be "
        with _disable_current_modes():
            found = self.assumed.places(rows, count, choices).reshape(*shape, count).movedim(-1, dim or 0)
            found = found.reshape(tuple(places.shape)).contiguous()
        self.attach(places, found, frozenset({words + ROUTINGS[self.assumed.routing]}))

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of tensors that unknown ones were written to, and of their views."""
        given = _by_name(func, args, kwargs)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_among((given.get(argument.name),)):
                    self._forget_drawn(tensor)
                    for key in (id(tensor), *self._in_storage.get(_storage_of(tensor), ())):
                        self._forget(key)

    def _taken_finite(self, func: Any, args: Any) -> torch.Tensor | None:
        """Answer of `isnan`, `isinf` and the operators that make up `isfinite`, for the finite values of training."""
        tensor = args[0]
        if tensor.numel() > self.max_elements or not tensor.is_floating_point():
            return None
        if func is aten.eq.Tensor and args[1] is not tensor:
            return None
        if func is aten.ne.Scalar and args[1] != float("inf"):
            return None
        with _disable_current_modes():
            return torch.full(tuple(tensor.shape), func in (aten.eq.Tensor, aten.ne.Scalar))

    def _forget_drawn(self, written: torch.Tensor) -> None:
        """Forget where numbers in a storage come from that was written to."""
        if self._drawn:
            storage = _storage_of(written)
            for key, known in list(self._drawn.items()):
                one = known()
                if one is not None and _storage_of(one) == storage:
                    del self._drawn[key]

    def _compared(self, func: Any, drawn: torch.Tensor, bound: Any) -> tuple[torch.Tensor | None, frozenset[str]]:
        """How drawn numbers compare with one, where that is sure; of a single one, also where it isn't."""
        is_false, is_true = (sure(bound) for sure in _BOUNDS[func])
        with _disable_current_modes():
            if (is_false or is_true) and drawn.numel() <= self.max_elements:
                return torch.full(tuple(drawn.shape), is_true), frozenset()
            if drawn.numel() == 1:
                return func(torch.full(tuple(drawn.shape), self.assumed.draw), bound), frozenset({_DRAW})
        return None, frozenset()

    def _item(self, func: Any, tensor: torch.Tensor) -> Any:
        value = self.value_of(tensor)
        of_draw = _DRAW in self._basis_of(tensor) or self._is_drawn(tensor)
        if of_draw and running_while() is not None:  # it may go on until another number is drawn
            value, of_draw = None, False
        if value is not None and self._decide([tensor]):
            with _disable_current_modes():
                known = value.item()
            self._note_condition(tensor, known)
            return known
        try:
            return func(tensor)  # constants that the fake mode knows itself
        except DataDependentOutputException:
            if of_draw:
                self.draw_decided = True
                return self.assumed.draw
            answer = self._answer(tensor.dtype)
            self.assumptions.append(f"an unknown {_name(tensor.dtype)} value was read as {answer}{calling_line()}")
            return answer

    def _answer(self, dtype: torch.dtype) -> float | bool | int:
        """The assumed value; in a loop that has turned as often as it shall, one that may end it.

        Raises:
            EndlessError: If a loop goes on and on.
        """
        loop = running_while()
        if loop is None:
            return self.assumed.of(dtype)
        if self._loop is None or self._loop.frame != loop.frame or self._loop.line != loop.line:
            self._loop, self._loop_reads = loop, Counter()
        self._loop_reads[loop.at] += 1
        turn = self._loop_reads[loop.at]
        turns = self.assumed.loop_turns
        if turn > (_MOST_READS if loop.has_others else _MOST_TURNS):
            answer = self.assumed.of(dtype)
            raise EndlessError(
                f"a loop goes on for ever while an unknown {_name(dtype)} value is read as {answer}{calling_line()}, "
                "and how often it turns only real data can tell"
            )
        if turns is None or turn <= turns:
            return self.assumed.in_turn(dtype, turn)
        self.assumptions.append(f"a loop was taken to turn {turns} times{calling_line()}")
        return self.assumed.ending(dtype, turn - turns - 1)

    def _note_condition(self, tensor: torch.Tensor, value: Any) -> None:
        """Note a branch of the user's own on values of the batch, which other batches may take otherwise."""
        if tensor.dtype is torch.bool and _OF_BATCH in self._basis_of(tensor) and is_read_by_user():
            self.conditions.append(
                f"a condition on the batch was {value}{calling_line()}: figures are those of batches in which it is so"
            )

    def _real_result(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        packet = func._overloadpacket
        if packet in _WITHOUT_VALUES or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if packet in _FILLED_FACTORIES and self._is_too_large(args, kwargs, _filled_elements(packet, args)):
            return None
        is_made = not tensors and packet not in _FILLED_FACTORIES
        if is_made and (_takes_tensors(func) or not self._is_small(func, args, kwargs)):
            return None
        values = {id(tensor): self._filled_like(packet, tensor) for tensor in tensors}
        if any(value is None for value in values.values()):
            return None

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

    def _is_small(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether what a factory makes from numbers alone (`linspace`, `hann_window`) may be carried."""
        with _disable_current_modes():
            try:
                made = func(*args, **{**kwargs, "device": torch.device("meta")})
            except (RuntimeError, NotImplementedError):
                return False
        return isinstance(made, torch.Tensor) and made.numel() <= self._most(made.dtype)

    def _most(self, dtype: torch.dtype) -> int:
        return self.max_elements if dtype in _INTEGER_TYPES else _MAX_FLOATS

    def _is_too_large(self, args: Any, kwargs: Any, elements: int) -> bool:
        """Whether a factory fills more elements than are carried of its dtype, which `full` takes from its value."""
        like = args[0].dtype if isinstance(args[0], torch.Tensor) else torch.int64
        dtype = kwargs.get("dtype") or like
        return elements > self._most(dtype)

    def _filled_like(self, packet: Any, tensor: torch.Tensor) -> torch.Tensor | None:
        """Values of an argument; any will do where only its shape counts."""
        value = self.value_of(tensor)
        if value is None and packet in _FILLED:
            with _disable_current_modes():
                return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape if packet in _LIKE else ())
        return value

    def _value_sized(self, func: Any, args: Any, kwargs: Any, real: Any, basis: frozenset[str]) -> Any:
        tensor = args[0]
        if real is None and func is aten.bincount.default:
            return self._unknown_counts(*args, **kwargs)
        if real is None and func is aten._unique2.default:
            return self._unknown_distinct(tensor)
        if real is None:
            raise UnknownSizeError(f"the output size of {func} depends on the values of floating-point tensors")

        def convert(value: torch.Tensor) -> torch.Tensor:
            return self.attach(self._empty_like(value), value, basis)

        return tree_map(convert, real)

    def _unknown_distinct(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Distinct values of a tensor without values, as many as there can be; or one value."""
        size = tensor.numel()
        most = 2 if tensor.dtype is torch.bool else 1 << min(62, 8 * tensor.element_size())
        count = min(size, most if self.assumed.all_distinct else 1)
        words = f"the {size} unknown elements of a tensor were taken to have {count} distinct value{'s' * (count != 1)}"
        self.taken.append(words)
        self.took_distinct = self.took_distinct or count > 1
        with _disable_current_modes():
            inverse = (torch.arange(size) % max(1, count)).reshape(tensor.shape)
            counts = torch.bincount(inverse.flatten(), minlength=count)
        with self.fake_mode:
            values = torch.empty(count, dtype=tensor.dtype, device="cpu")
        return values, self.attach(self._empty_like(inverse), inverse), self.attach(self._empty_like(counts), counts)

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
            basis = self._basis_of(index)
            converted += [self.attach(self._empty_like(place), place, basis) for place in places]
        return converted

    def _attach_all(self, result: Any, real: Any, basis: frozenset[str]) -> None:
        fakes, values = tree_leaves(result), tree_leaves(real)
        if len(fakes) != len(values):
            return
        for fake, value in zip(fakes, values, strict=True):
            if not (isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor)):
                continue
            if value.numel() <= self._most(value.dtype) and fake.shape == value.shape:
                self.attach(fake, value, basis)

    def _empty_like(self, real: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes(), self.fake_mode:
            return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="cpu")
