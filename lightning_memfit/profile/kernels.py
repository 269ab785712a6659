"""Scratch memory of convolutions on the CPU, which dispatch modes don't see: learned by running each of them once.

oneDNN's choice of a kernel, and with it the scratch memory, differs from processor to processor and from version to
version: no formula holds for all. An operator that a trace meets is run on zeros outside all modes, and what the
allocator reports is remembered for the life of the process.

Written for torch 2.11-2.13 (`_enable_profiler_legacy`: the profiler that replaced it takes seconds to start, and some
builds write two lines to stderr whenever it runs); `tests/unit/profile/test_kernels.py` fails when it moves.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default

CONVOLUTIONS = frozenset({_CONVOLUTION, _CONVOLUTION_BACKWARD})
"""Operators whose kernels have scratch memory that matters."""

_MOST_FLOPS = 2e9
"""An operator with more is run on fewer samples: this is about a tenth of a second on one core."""

_MOST_BYTES = 256 << 20
"""An operator whose operands take more is run on fewer samples."""

_NUM_PEAKS = 8
"""Number of local peaks that are told apart; kernels seen so far have up to six."""

_FEW, _MORE = 2, 3
"""Samples on which large operators are run; one sample often takes another kernel than two."""


def kernel_scratch_bytes(operator: Any, args: Any, result: Any) -> int:
    """Bytes that an operator's CPU kernel takes from torch's allocator while it runs and gives back.

    Exact on one thread. On several threads oneDNN may take more for gradients of weights, which every thread adds up
    on its own.

    Args:
        operator: The operator that was called.
        args: Its arguments.
        result: What it returned.
    """
    return max(kernel_scratch_peaks(operator, args, result)) if operator in CONVOLUTIONS else 0


def kernel_scratch_peaks(operator: Any, args: Any, result: Any) -> tuple[int, ...]:
    """Every local peak of a convolution's scratch memory in the order of time, always the same number of them.

    Each local peak grows by a constant per sample. The highest need not, as another one may be the highest for large
    micro-batches; with all of them, it can still be told from two small micro-batches.

    Args:
        operator: One of `CONVOLUTIONS`.
        args: Its arguments.
        result: What it returned.
    """
    run = _learned_run(operator, args, result)
    found = (estimated_scratch_bytes(operator, args, result),) if run is None else run.peaks
    last = max(found[_NUM_PEAKS - 1 :], default=0)
    return (*found[: _NUM_PEAKS - 1], *[0] * (_NUM_PEAKS - 1 - len(found)), last)


def estimated_scratch_bytes(operator: Any, args: Any, result: Any) -> int:
    """Scratch memory of a convolution by formula, for one that is too large to run or can't be observed.

    The formula is that of oneDNN on a processor with AVX-512 (torch 2.13): it convolves in a layout of its own.
    Forward copies input and weight into it, gives them back, and copies the output out of it; backward holds copies in
    the shapes of input and output, and in half precision accumulates the weight's gradient in fp32. Pointwise
    convolutions in fp32 need no copies.

    Args:
        operator: `aten.convolution` or `aten.convolution_backward`.
        args: Its arguments.
        result: What it returned.
    """
    output: torch.Tensor
    data: torch.Tensor
    weight: torch.Tensor
    if operator is _CONVOLUTION:
        (data, weight), output = args[:2], result
    else:
        output, data, weight = args[:3]
    half = weight.element_size() < 4
    if math.prod(weight.shape[2:]) == 1 and not half:
        return 0
    if operator is _CONVOLUTION:
        return max(data.nbytes + weight.nbytes, output.nbytes)
    if half:
        return data.nbytes + output.nbytes + 4 * weight.numel()
    return max(data.nbytes + output.nbytes, weight.nbytes)


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

    def zeros(self) -> torch.Tensor:
        """A real tensor like it."""
        memory = torch.zeros(self.span, dtype=self.dtype, device="cpu")
        return memory.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class _Run:
    """The allocations of an operator while it ran."""

    changes: tuple[int, ...]
    """Sizes in the order of time; those that were freed are negative."""
    kept_bytes: int
    """Bytes of its results."""

    @property
    def peaks(self) -> tuple[int, ...]:
        """Bytes allocated beyond the results, each time something is freed next."""
        live = accumulate(self.changes)
        following = (*self.changes[1:], -1)
        moments = zip(self.changes, live, following, strict=True)
        return tuple(max(0, size - self.kept_bytes) for change, size, after in moments if change > 0 > after)


_known: dict[str, _Run | None] = {}
"""Runs by operator and arguments; None where the operator can't be run."""


def _learned_run(operator: Any, args: Any, result: Any) -> _Run | None:
    """What the allocator reports for an operator; None where it can't be run, or costs too much."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if any(tensor.layout is not torch.strided or tensor.device.type != "cpu" for tensor in tensors):
        return None
    if torch._C._autograd._profiler_enabled():
        return None  # there can only be one, and it is the user's
    operands = tree_map(_operand, args)
    samples = operands[0].shape[0]
    share = _MORE / max(_MORE, samples)
    flops = flop_registry[operator._overloadpacket](*args, out_val=result)
    if flops <= _MOST_FLOPS and _operand_bytes(operands) <= _MOST_BYTES:
        return _run(operator, operands)
    if flops * share <= _MOST_FLOPS and _operand_bytes(_of_samples(operator, operands, _MORE)) <= _MOST_BYTES:
        few, more = (_run(operator, _of_samples(operator, operands, count)) for count in (_FEW, _MORE))
        return _extrapolated(few, more, samples)
    return None


def _operand(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Operand(tuple(value.shape), tuple(value.stride()), value.dtype)


def _operand_bytes(operands: Any) -> int:
    leaves = (leaf for leaf in tree_leaves(operands) if isinstance(leaf, _Operand))
    return sum(leaf.span * leaf.dtype.itemsize for leaf in leaves)


def _of_samples(operator: Any, operands: Any, count: int) -> Any:
    """Operands with another number of samples in the input and, in backward, in the output's gradient."""
    batched = 1 if operator is _CONVOLUTION else 2
    resized = (replace(operand, shape=(count, *operand.shape[1:])) for operand in operands[:batched])
    return (*resized, *operands[batched:])


def _extrapolated(few: _Run | None, more: _Run | None, samples: int) -> _Run | None:
    """The run of that many samples, from two that differ in a sample; None if they are not alike.

    On one thread every single allocation grows by a constant per sample. The peak need not, as other allocations may
    be alive at it.
    """
    if few is None or more is None or [size > 0 for size in few.changes] != [size > 0 for size in more.changes]:
        return None

    def at_samples(low: int, high: int) -> int:
        return low + (high - low) * (samples - _FEW)

    changes = tuple(at_samples(low, high) for low, high in zip(few.changes, more.changes, strict=True))
    return _Run(changes, at_samples(few.kept_bytes, more.kept_bytes))


def _run(operator: Any, operands: Any) -> _Run | None:
    """Run an operator on zeros, once in the life of the process; None if it fails."""
    key = repr((operator, operands, torch.backends.mkldnn.enabled))
    if key not in _known:
        try:
            _known[key] = _observed(operator, operands)
        except RuntimeError:  # not implemented for that type, or no memory for it: a trace needs neither
            _known[key] = None
    return _known[key]


def _observed(operator: Any, operands: Any) -> _Run:
    with _outside_of_everything():
        tensors = tree_map(lambda leaf: leaf.zeros() if isinstance(leaf, _Operand) else leaf, operands)
        with _allocations() as changes:
            results = operator(*tensors)
    kept = sum(leaf.nbytes for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor))
    return _Run(tuple(changes), kept)


@contextmanager
def _outside_of_everything() -> Iterator[None]:
    """Run without modes, gradients and autocast, on one thread.

    With several threads scratch memory jumps with the number of samples, so that two sizes would tell nothing about
    others; and a forked process (`background.in_child`) has only one.
    """
    threads = torch.get_num_threads()
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """Collect the sizes that the CPU allocator gives out, and as negative numbers those that it takes back.

    The list is filled at the end.
    """
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    changes: list[int] = []
    # Only memory, the second flag, is recorded; no shapes, stacks, FLOPs or modules.
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        yield changes
    finally:
        events = (event for thread in _disable_profiler_legacy() for event in thread)
        changes.extend(event.cpu_memory_usage() for event in events if str(event.kind()) == "memory_alloc")
