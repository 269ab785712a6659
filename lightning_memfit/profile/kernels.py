"""Memory that CPU kernels take while they run, which dispatch modes don't see: learned by running each operator once.

No formula holds for all: what a kernel takes depends on the processor, on oneDNN's choice and on torch's version. An
operator that a trace meets is run on made-up tensors outside all modes, and what the allocator reports is remembered
in the process. An operator that would take long is run on few samples.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
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

_MOST_FLOPS, _MOST_BYTES = 2e9, 256 << 20
"""An operator with more, or with larger operands, is run on fewer samples: this is about a tenth of a second."""

_AT_ONCE_FLOPS, _AT_ONCE_BYTES = 2e7, 1 << 20
"""An operator with fewer is run in any case."""

_FEW, _MORE = 2, 3
"""Samples on which large operators are run; one sample often takes another kernel than two."""

_SOME, _MANY = 32, 64
"""Rows on which large operators without a formula of their own are run where there are more than that."""

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
        mkldnn, deterministic = torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()
        self._settings = repr((describe_processor("cpu"), mkldnn, precisions_on_host(), deterministic))

    def of(self, func: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
        """What an operator takes; None if nothing but its results, scalars left out."""
        if not _runs_kernel(func):
            return None
        found: Kernel | None = _UNKNOWN
        if func.namespace == "aten":
            with contextlib.suppress(TypeError, RuntimeError):  # not hashable, or a layout without strides
                parts = _key(args), _key(kwargs.items())
                key = (self._settings, func.name(), _is_fake(result), torch.is_grad_enabled(), *parts)
                if key not in _known and profiler_runs():  # there can only be one, and it is the user's
                    self.profiled = True
                    return None
                if key not in _known:
                    _known[key] = _learned(func, args, kwargs, result)
                found = _known[key]
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


_known: dict[tuple[Any, ...], Kernel | None] = {}
"""What calls take, by what decides which kernels run. What traces learn is brought home."""

bring_home(lambda: _known, _known.update)


def _learned(func: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
    """What an operator takes, found by running it, or some samples of it."""
    if not _may_run(args, kwargs):
        return _UNKNOWN
    call = _Call(func, tree_map(_operand, tuple(args)), tree_map(_operand, dict(kwargs)))
    flops = _flops(func, args, kwargs, result)
    size_bytes = call.num_bytes + sum(tensor.nbytes for tensor in _strided(result))
    is_small = flops <= _AT_ONCE_FLOPS and size_bytes <= _AT_ONCE_BYTES
    if not is_small and call.writes_only_its_result():
        return None
    if flops <= _MOST_FLOPS and size_bytes <= _MOST_BYTES:
        return _beyond_result(_run(call), result)
    return _beyond_result(_of_few_samples(call, flops, size_bytes), result)


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
        elif not isinstance(value, torch.Generator):
            parts.append(value)
    return tuple(parts)


def _rounded(value: float) -> float:
    """The number if it is one that kernels may treat in another way than others, such as no dropout; else one half."""
    return value if value in (0.0, 1.0, 2.0, math.inf, -math.inf) else 0.5


_PLAIN = (FakeTensor, torch.Tensor, torch.nn.Parameter)


def _may_run(args: Any, kwargs: Any) -> bool:
    """Whether torch's own operators can have no effect on such operands: plain tensors of the CPU."""
    return all(
        type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.device.type == "cpu"
        for tensor in tensors_among((*args, *kwargs.values()))
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
        """An operand of the same layout with other sizes, by the old ones."""
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

        Or unit matrices, which can be inverted, and ones for integers: pivots count from one.
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

    def writes_only_its_result(self) -> bool:
        """Whether each element is computed by itself, and no operand is converted to the type of another before."""
        if self.func is aten._to_copy.default:
            return True
        dtypes = {operand.dtype for operand in self.operands}
        numbers = {type(value) for value in self.leaves} & {float, complex}
        is_uniform = len(dtypes) == 1 and (
            not numbers or (complex not in numbers and all(dtype.is_floating_point for dtype in dtypes))
        )
        return is_uniform and torch.Tag.pointwise in self.func.tags

    def of_samples(self, samples: int, count: int) -> "_Call":
        """The call with another number of samples, which every tensor and argument of that size has."""
        if self.func in _BATCHED:
            batched = _BATCHED[self.func]
            resized = (replace(operand, shape=(count, *operand.shape[1:])) for operand in self.args[:batched])
            return replace(self, args=(*resized, *self.args[batched:]))

        def resize(leaf: Any) -> Any:
            return leaf.resized({samples: count}) if isinstance(leaf, _Operand) else leaf

        def resize_number(leaf: Any) -> Any:
            return count if type(leaf) is int and leaf == samples else leaf

        pairs = zip(self.func._schema.arguments, self.args, strict=False)
        args = tuple(
            tree_map(resize_number, value) if "SymInt" in str(argument.real_type) else value
            for argument, value in pairs
        )
        return replace(self, args=tree_map(resize, args), kwargs=tree_map(resize, self.kwargs))

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


def _run(call: _Call) -> Kernel | None:
    """Run an operator on made-up tensors; None if it fails."""
    try:
        return _observed(call)
    except (RuntimeError, IndexError, ValueError, TypeError):  # for that type, or made-up values that it doesn't take
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
    peaks, extra = (
        tuple(a + (b - a) * (samples - few) // (more - few) for a, b in zip(first, second, strict=True))
        for first, second in ((low.peaks, high.peaks), (low.extra, high.extra))
    )
    return replace(high, peaks=peaks, extra=extra)


# --- what a run shows beyond the result that is expected --------------------------------------------------------------


def _beyond_result(run: Kernel | None, result: Any) -> Kernel | None:
    """What a run took beyond the results that the trace took it to have; None for nothing but scalars."""
    if run is None:
        return _UNKNOWN
    peaks = tuple(max(0, size) for size in run.peaks)
    peaks = (*peaks[: _NUM_PEAKS - 1], max(peaks[_NUM_PEAKS - 1 :])) if len(peaks) >= _NUM_PEAKS else peaks
    extra = run.extra if any(run.extra) else ()
    dtypes = run.dtypes if run.dtypes != _types(_strided(result)) else ()
    supposed = tuple(map(_order, _strided(result)))  # batch norm's of turned input lie otherwise
    pairs = zip(run.orders, supposed, strict=False)
    is_other = len(run.orders) == len(supposed) and any(real and fake and real != fake for real, fake in pairs)
    orders = run.orders if is_other else ()
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


def laid_out(tensor: torch.Tensor, order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor."""
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
