"""Memory that CPU kernels take while they run, which dispatch modes don't see: learned by running each operator once.

No formula holds for all: what a kernel takes depends on the processor, on oneDNN's choice and on torch's version. An
operator that a trace meets is run on made-up tensors outside all modes, and what the allocator reports is remembered
in the process.

Most operators take nothing but their results. That is learned from two small calls, to which those of most shapes come
down; only the others are run at the sizes of the trace, or, if that would take long, on few samples.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memfit.memory.allocations import allocation_events, profiler_runs
from lightning_memfit.memory.float32_products import precisions_on_host
from lightning_memfit.memory.flops import flop_formula
from lightning_memfit.memory.ledger import held_tensors, tensors_among
from lightning_memfit.profile.fingerprint import describe_processor
from lightning_memfit.profile.process import bring_home
from lightning_memfit.profile.quiet import collector_paused

aten = torch.ops.aten

_MOST_FLOPS = 2e9
"""An operator with more is run on fewer samples: this is about a tenth of a second on one core."""

_MOST_BYTES = 256 << 20
"""An operator whose operands take more is run on fewer samples."""

_AT_ONCE_FLOPS, _AT_ONCE_BYTES = 2e7, 1 << 20
"""An operator with fewer is run as it is: small sizes would tell no sooner."""

_FEW, _MORE = 2, 3
"""Samples on which large operators are run; one sample often takes another kernel than two."""

_SOME, _MANY = 32, 64
"""Rows on which large operators without a formula of their own are run where there are more than that."""

_SMALL_ELEMENTS = 1 << 14
"""Elements of the larger of two small operands: above the sizes from which kernels copy in tiles or sort by radix."""

_TELLING_ELEMENTS = 256
"""Elements of an operand whose conversion, to a byte each, is more than scratch memory of scalars."""

_MOST_SIZES = 8
"""Different sizes of operands that a small call can have."""

_SCALAR_BYTES = 64
"""Scratch memory of scalars, such as a number that is converted to the type of a tensor."""

_NUM_PEAKS = 8
"""Number of local peaks that are told apart; kernels seen so far have up to six."""

_NUM_NAMED = 3
"""Operators that are named in a remark."""

_BATCHED = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""Number of the first operands that hold samples, where other operands may have the same sizes by chance."""


@dataclass(frozen=True)
class Kernel:
    """What an operator's kernel takes from the allocator beyond its results."""

    peaks: tuple[int, ...] = ()
    """Bytes beyond the results at every local peak, in the order of time. Each grows by a constant per sample, while
    the highest of them may be another one for large batches."""
    extra: tuple[int, ...] = ()
    """Bytes of each result's storage beyond those of its elements; empty if there are none."""
    dtypes: tuple[str, ...] = ()
    """Types of the results, where they are others than those of fake results; else empty."""
    orders: tuple[tuple[int, ...], ...] = ()
    """Dimensions of each result in memory, outermost first, where fake results lie otherwise; else empty."""
    is_known: bool = True
    """False if the operator could not be run."""


# --- what is asked ----------------------------------------------------------------------------------------------------


class KernelMemory:
    """What the operators of one trace take beyond their results.

    Attributes:
        unknown: Names of operators that could not be run, as keys.
    """

    def __init__(self) -> None:
        self.unknown: dict[str, None] = {}
        self.profiled = False
        """Whether operators were left out as a profiler ran."""
        self._settings = repr((describe_processor("cpu"), _switches()))
        self._calls: dict[Any, Kernel | None] = {}
        """By operator and arguments."""

    def of(self, func: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
        """What an operator takes; None if nothing but its results, scalars left out.

        Args:
            func: The operator that was called.
            args: Its arguments, fake or real.
            kwargs: Its keywords.
            result: What it returned.
        """
        if not _runs_kernel(func):
            return None
        try:
            key = (func, _is_fake(result), torch.is_grad_enabled(), _key(args), _key(kwargs.items()))
            found: Kernel | None = self._calls.get(key, _MISSING)
        except (TypeError, RuntimeError):  # not hashable, or a layout without strides
            found = _UNKNOWN
        if found is _MISSING:
            if profiler_runs():  # there can only be one, and it is the user's
                self.profiled = True
                return None
            found = self._calls[key] = self._learn(func, args, kwargs, result)
        if found is None or found.is_known:
            return found
        self.unknown[f"{func.namespace}::{func._opname}"] = None
        return None

    def remarks(self) -> list[str]:
        """What is not known, in a clause."""
        if self.profiled:
            return ["scratch memory of kernels was not learned, as a profiler was running, and may be missing"]
        if not self.unknown:
            return []
        named = [f"`{name}`" for name in self.unknown]
        more = f" and {len(named) - _NUM_NAMED} more operators" if len(named) > _NUM_NAMED else ""
        return [f"scratch memory of {', '.join(named[:_NUM_NAMED])}{more} is not known"]

    def _learn(self, func: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
        if not _may_run(func, args, kwargs):
            return _UNKNOWN
        call = _Call.of(func, args, kwargs, result)
        flops = _flops(func, args, kwargs, result)
        size_bytes = call.num_bytes + sum(tensor.nbytes for tensor in _strided(result))
        is_small = flops <= _AT_ONCE_FLOPS and size_bytes <= _AT_ONCE_BYTES
        if not is_small and self._is_free(call, result):
            return None
        if flops <= _MOST_FLOPS and size_bytes <= _MOST_BYTES:
            return self._remembered(call, result, functools.partial(_run, call))
        return self._remembered(call, result, functools.partial(_of_few_samples, call, flops, size_bytes))

    def _is_free(self, call: "_Call", result: Any) -> bool:
        """Whether an operator on tensors of such types and layouts takes nothing, by two small sizes."""
        if call.func in _BATCHED or not call.small_ones_tell() or call.has_sizes():
            return False
        small = [call.small(elements) for elements in (1, _SMALL_ELEMENTS)]
        return all(
            one is not None and self._remembered(one, result, functools.partial(_run, one)) is None for one in small
        )

    def _remembered(self, call: "_Call", result: Any, run: Callable[[], Kernel | None]) -> Kernel | None:
        """What a call takes, run if that isn't known yet."""
        key = f"{self._settings} {call}"
        if key not in _known:
            _known[key] = _beyond_result(run(), result)
        return _known[key]


_MISSING: Any = object()

_UNKNOWN = Kernel(is_known=False)

_FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like",
              "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "scalar_tensor", "arange",
              "_efficientzerotensor"}  # fmt: skip
"""Operators that make a tensor and fill it."""

_NO_KERNEL = {"_local_scalar_dense", "set_", "resize_", "record_stream", "is_same_size", "lift_fresh", "detach_",
              "_unsafe_view", "_has_same_storage_numel", "_version", "is_pinned", "_linalg_check_errors"}  # fmt: skip
"""Operators that change or read what belongs to a tensor, or one element of it."""


@functools.cache
def _runs_kernel(func: Any) -> bool:
    """Whether an operator may take more than its results, by its name and schema alone."""
    if not isinstance(func, OpOverload):
        return True
    arguments = (*func._schema.arguments, *func._schema.returns)
    if not any("Tensor" in str(argument.type) for argument in arguments) or func.is_view:
        return False
    if func.namespace == "aten":
        return func._opname not in _FACTORIES | _NO_KERNEL
    return func.namespace not in ("prim", "profiler")


def _is_fake(result: Any) -> bool:
    return isinstance(next(tensors_among((result,)), None), FakeTensor)


def _is_uniform(values: Any) -> bool:
    """Whether no operand has to be converted to the type of another, which takes memory of the operand's size."""
    dtypes = {value.dtype for value in values if isinstance(value, _Operand)}
    if len(dtypes) > 1:
        return False
    numbers = {type(value) for value in values} & {float, complex}
    return not numbers or (complex not in numbers and all(dtype.is_floating_point for dtype in dtypes))


def _key(values: Any) -> tuple[Any, ...]:
    """What decides which kernel is taken, hashable. Numbers with a fraction change from step to step, and don't."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value))
        elif type(value) is float:
            parts.append(("float", _rounded(value)))
        else:
            parts.append(value)
    return tuple(parts)


def _rounded(value: float) -> float:
    """The number if it is one that kernels may treat in another way than others, such as no dropout; else one half."""
    return value if value in (0.0, 1.0, 2.0, math.inf, -math.inf) else 0.5


_PLAIN = (FakeTensor, torch.Tensor, torch.nn.Parameter)


def _may_run(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether running an operator can have no effect: torch's own operators on plain tensors of the CPU.

    Others may write files, send something, or count their calls.
    """
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    return all(
        type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.device.type == "cpu"
        for tensor in tensors_among((*args, *kwargs.values()))
    )


# --- what is remembered -----------------------------------------------------------------------------------------------

_known: dict[str, Kernel | None] = {}
"""What calls take, by the call in words with what decides which kernels run. What traces learn is brought home."""

bring_home(lambda: _known, _known.update)


def _switches() -> tuple[object, ...]:
    """Settings of torch that decide which kernels run, beside the processor and its variables."""
    return (
        torch.backends.mkldnn.enabled,
        precisions_on_host(),
        torch.are_deterministic_algorithms_enabled(),
    )


# --- running an operator ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operand:
    """The properties of a tensor that decide which kernel is chosen."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory; an expanded tensor has fewer than its shape tells."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def resized(self, sizes: dict[int, int]) -> "_Operand":
        """An operand of the same layout with other sizes.

        Args:
            sizes: New sizes by old ones; others stay.
        """
        shape = tuple(sizes.get(size, size) for size in self.shape)
        strides = list(self.strides)
        dense = dense_before = 1
        for dim in sorted(range(len(shape)), key=lambda dim: (self.strides[dim], -dim)):
            if self.strides[dim]:
                strides[dim] = dense * max(1, self.strides[dim] // dense_before)
                dense_before = max(dense_before, self.strides[dim] * self.shape[dim])
                dense = max(dense, strides[dim] * shape[dim])
        return replace(self, shape=shape, strides=tuple(strides))

    def made(self, unit: bool) -> torch.Tensor:
        """A real tensor like it: ones, with which divisions and logarithms are defined; zeros where it holds indices.

        Args:
            unit: Make unit matrices, which can be inverted, and ones for integers: pivots count from one.
        """
        if self.dtype.is_floating_point or self.dtype.is_complex:
            if unit and len(self.shape) > 1 and 0 not in self.strides:
                made = torch.zeros(self.span, dtype=self.dtype, device="cpu").as_strided(self.shape, self.strides)
                made.diagonal(dim1=-2, dim2=-1).fill_(1)
                return made
            memory = torch.ones(self.span, dtype=self.dtype, device="cpu")
        else:
            memory = torch.full((self.span,), int(unit), dtype=self.dtype, device="cpu")
        return memory.as_strided(self.shape, self.strides)


def _operand(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Operand(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, torch.Generator):
        return None
    return _rounded(value) if type(value) is float else value


@dataclass(frozen=True)
class _Call:
    """An operator and its arguments, with tensors described by `_Operand`."""

    func: Any
    args: Any
    kwargs: Any
    grad: bool
    """Whether gradients are enabled: recurrent layers then keep what backward needs."""
    in_trace: bool
    """Whether what a run shows is compared with fake results, which may be of other types and layouts."""

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any, result: Any) -> "_Call":
        """The call that returned a result."""
        described = tree_map(_operand, tuple(args)), tree_map(_operand, dict(kwargs))
        return cls(func, *described, torch.is_grad_enabled(), _is_fake(result))

    @property
    def leaves(self) -> list[Any]:
        """Tensors, numbers and what else is among the arguments, in their order."""
        return tree_leaves((self.args, self.kwargs))

    @property
    def operands(self) -> list[_Operand]:
        """All tensors in the order of arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _Operand)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the operands."""
        return sum(operand.span * operand.dtype.itemsize for operand in self.operands)

    def small_ones_tell(self) -> bool:
        """Whether what small sizes take shows what others take.

        A converted operand is as small as a scalar where few elements are broadcast, or where all operands are small.
        """
        spans = {operand.span for operand in self.operands if operand.span > 1}
        if max(spans, default=0) < _TELLING_ELEMENTS:
            return False
        return len(spans) == 1 or _is_uniform(self.leaves)

    def has_sizes(self) -> bool:
        """Whether other arguments may tell sizes, so that those of tensors can't be changed alone."""
        most = max((len(operand.shape) for operand in self.operands), default=0)
        if any(type(leaf) is int and abs(leaf) > most for leaf in self.leaves):
            return True
        arguments = self.func._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, self.args, strict=False)} | self.kwargs
        sizes = [given.get(argument.name) for argument in arguments if _is_size(argument)]
        return any(type(leaf) is int and abs(leaf) > 1 for leaf in tree_leaves(sizes))

    def small(self, elements: int) -> "_Call | None":
        """The call with each size made a small power of two; larger sizes stay larger and multiples of others.

        Args:
            elements: The largest operand has at least that many, unless it has fewer here.
        """
        sizes = sorted({size for operand in self.operands for size in operand.shape if size > 1})
        if len(sizes) > _MOST_SIZES:
            return None
        first = 2
        while True:
            smaller = {size: min(size, first << place) for place, size in enumerate(sizes)}
            resized = self.resized(smaller)
            largest = max((operand.span for operand in resized.operands), default=0)
            if largest >= elements or all(small == size for size, small in smaller.items()):
                return resized
            first *= 2

    def resized(self, sizes: dict[int, int]) -> "_Call":
        """The call with other sizes of its tensors."""

        def resize(leaf: Any) -> Any:
            return leaf.resized(sizes) if isinstance(leaf, _Operand) else leaf

        return replace(self, args=tree_map(resize, self.args), kwargs=tree_map(resize, self.kwargs))

    def of_samples(self, samples: int, count: int) -> "_Call":
        """The call with another number of samples, which every tensor and argument of that size has."""
        if self.func in _BATCHED:
            batched = _BATCHED[self.func]
            resized = (replace(operand, shape=(count, *operand.shape[1:])) for operand in self.args[:batched])
            return replace(self, args=(*resized, *self.args[batched:]))

        def resize(leaf: Any) -> Any:
            return count if type(leaf) is int and leaf == samples else leaf

        pairs = zip(self.func._schema.arguments, self.args, strict=False)
        args = tuple(tree_map(resize, value) if _is_size(argument) else value for argument, value in pairs)
        return replace(self, args=args).resized({samples: count})

    def samples(self) -> int | None:
        """The first dimension that a few samples can stand for; None if there is none.

        A workspace, of bytes in no order that is known here, can't be made for fewer.
        """
        if any(operand.dtype is torch.uint8 and len(operand.shape) == 1 for operand in self.operands):
            return None
        if self.func in _BATCHED:
            return int(self.args[0].shape[0])
        fixed = [leaf for leaf in self.leaves if type(leaf) is int]
        for size in self.operands[0].shape if self.operands else ():
            alone = all(operand.shape.count(size) <= 1 for operand in self.operands)
            multiple = any(number > size and number % size == 0 for number in fixed)
            if size > _MORE and alone and not multiple:
                return size
        return None


def _is_size(argument: Any) -> bool:
    """Whether an argument of a schema tells sizes."""
    return "SymInt" in str(argument.real_type)


_FAILURES = (RuntimeError, IndexError, ValueError, TypeError)
"""Not implemented for that type, no memory for it, or made-up values that it doesn't take."""


def _run(call: _Call) -> Kernel | None:
    """Run an operator on made-up tensors; None if it fails."""
    try:
        return _observed(call)
    except _FAILURES:
        return None


def _observed(call: _Call) -> Kernel:
    """What a run shows: all local peaks, also those that are lower than the results, and all types and orders."""
    unit = "linalg" in call.func._opname or "cholesky" in call.func._opname
    with _outside_of_everything():
        args, kwargs = tree_map(
            lambda leaf: leaf.made(unit) if isinstance(leaf, _Operand) else leaf, (call.args, call.kwargs)
        )
        held = {tensor.untyped_storage()._cdata for tensor in _strided((args, kwargs))}
        with allocation_events() as changes:
            result = call.func(*args, **kwargs)
        kept, extra, orders = 0, [], []
        for tensor in _strided(result):
            storage = tensor.untyped_storage()
            is_new = storage._cdata not in held
            held.add(storage._cdata)
            kept += storage.nbytes() if is_new else 0
            extra.append(max(0, storage.nbytes() - tensor.nbytes) if is_new else 0)
            orders.append(_order(tensor) if is_new else ())
    moments = zip(changes, accumulate(changes), (*changes, -1)[1:], strict=True)
    peaks = tuple(size - kept for change, size, after in moments if change > 0 > after)
    return Kernel(peaks, tuple(extra), _types(_strided(result)), tuple(orders))


@contextmanager
def _outside_of_everything() -> Iterator[None]:
    """Run without modes and autocast, on one thread, and leave the generator of random numbers as it is.

    With several threads scratch memory jumps with the number of samples, so that two sizes would tell nothing about
    others; and a forked process has only one. What Python's collector finds would count as freed by the operator.
    """
    threads = torch.get_num_threads()
    with _disable_current_modes(), torch.autocast("cpu", enabled=False), collector_paused():
        state = torch.default_generator.get_state()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.default_generator.set_state(state)


def _of_few_samples(call: _Call, flops: float, size_bytes: int) -> Kernel | None:
    """What a run would show of an operator that is too large for one, from runs on few samples."""
    samples = call.samples()
    if samples is None:
        return None
    counts = [(_FEW, _MORE)] if call.func in _BATCHED or samples <= _MANY else [(_SOME, _MANY), (_FEW, _MORE)]
    for few, more in counts:
        reduced = call.of_samples(samples, more)
        share = more / max(more, samples)
        if flops * share <= _MOST_FLOPS and max(reduced.num_bytes, size_bytes * share) <= _MOST_BYTES:
            return _extrapolated(_run(call.of_samples(samples, few)), _run(reduced), few, more, samples)
    return None


def _extrapolated(low: Kernel | None, high: Kernel | None, few: int, more: int, samples: int) -> Kernel | None:
    """What a run of that many samples would show, from two on fewer; None if they are not alike.

    On one thread every single allocation, and so every local peak, grows by a constant per sample. The highest need
    not, as it may be another of them.
    """
    if low is None or high is None or len(low.peaks) != len(high.peaks):
        return None

    def at_samples(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
        pairs = zip(first, second, strict=True)
        return tuple(a + (b - a) * (samples - few) // (more - few) for a, b in pairs)

    return replace(high, peaks=at_samples(low.peaks, high.peaks), extra=at_samples(low.extra, high.extra))


# --- what a run shows beyond the result that is expected --------------------------------------------------------------


def _beyond_result(run: Kernel | None, result: Any) -> Kernel | None:
    """What a run took beyond its results; None for nothing but scalars.

    Args:
        run: All that the run showed; None if it failed.
        result: What the trace took the operator to return.
    """
    if run is None:
        return _UNKNOWN
    peaks = tuple(max(0, size) for size in run.peaks)
    peaks = (*peaks[: _NUM_PEAKS - 1], max(peaks[_NUM_PEAKS - 1 :])) if len(peaks) >= _NUM_PEAKS else peaks
    extra = run.extra if any(run.extra) else ()
    dtypes = run.dtypes if run.dtypes != _types(_strided(result)) else ()
    orders = run.orders if _lie_otherwise(run.orders, result) else ()
    if max(peaks, default=0) <= _SCALAR_BYTES and not extra and not dtypes and not orders:
        return None
    return Kernel(peaks, extra, dtypes, orders)


def _strided(values: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold memory themselves, among results."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield from held_tensors(leaf)


def _types(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions in memory, outermost first, without those of size one; empty for gaps and for what is no float."""
    if not tensor.is_floating_point() or 0 in tensor.shape:
        return ()
    dims = sorted((dim for dim, size in enumerate(tensor.shape) if size > 1), key=tensor.stride, reverse=True)
    dense = 1
    for dim in reversed(dims):
        if tensor.stride(dim) != dense:
            return ()
        dense *= tensor.size(dim)
    return tuple(dims)


def _lie_otherwise(orders: tuple[tuple[int, ...], ...], result: Any) -> bool:
    """Whether a result lies in memory otherwise than what the trace took it to be, as batch norm's of turned input."""
    supposed = tuple(map(_order, _strided(result)))
    pairs = zip(orders, supposed, strict=False)
    return len(orders) == len(supposed) and any(real and fake and real != fake for real, fake in pairs)


def laid_out(tensor: torch.Tensor, order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor.

    Args:
        tensor: Tells the shape.
        order: Its dimensions, outermost first; those of size one may be missing.
    """
    strides, dense = [1] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = dense
        dense *= tensor.size(dim)
    return tuple(strides)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """FLOPs of an operator; without a formula, an upper bound: a product with the longest rows of its operands."""
    formula = flop_formula(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    elements = max((tensor.numel() for tensor in _strided(result)), default=0)
    rows = (tensor.size(-1) for tensor in tensors_among(args) if tensor.dim() > 1)
    return float(elements * max(rows, default=1))
