"""`OperatorWork`: what the operators of a step compute and move, alike ones in one row.

A row is what a time model needs of an operator and no more: its kind, FLOPs and bytes. Rows of two traces of different
micro-batches tell what each grows by per sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

MULTIPLYING = ("product", "attention", "convolution", "recurrence")
"""Kinds of operators that are bound by arithmetic where they are large; their dtype follows the name in a row."""
MOVING = ("elementwise", "function", "indexing")
"""Kinds that are bound by memory: plain arithmetic and copies; exponentials, norms and sums; rows of tables."""

UNALIGNED = "unaligned"
"""The last word of a product's kind if rows of its matrices don't begin at multiples of 16 bytes."""

_FUNCTIONS = {
    *("softmax", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "erf", "pow", "sqrt", "rsqrt", "sin", "cos", "norm"),
    *("sum", "mean", "var", "logsumexp", "nll", "mish", "softplus", "elu", "dropout", "bernoulli", "normal", "cumsum"),
}
_INDEXING = {"embedding", "index", "gather", "scatter", "topk", "sort", "argmax", "nonzero"}
"""Words of operators' names."""


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """Operators of one kind that compute and move as much as each other."""

    kind: str
    """One of `MOVING`, or of `MULTIPLYING` with the dtype of what is multiplied: `product bfloat16`; `product bfloat16
    unaligned` if rows don't begin at multiples of 16 bytes."""
    flops: float
    """FLOPs of each."""
    num_bytes: float
    """Bytes that each reads and writes."""
    times: float
    """Operators."""
    flops_per_sample: float = 0.0
    """What `flops` grows by with every sample of the micro-batch."""
    bytes_per_sample: float = 0.0
    """What `num_bytes` grows by with every sample of the micro-batch."""


PhaseWork = Mapping[str, tuple[OperatorWork, ...]]
"""Rows by phase of a step."""


@cache
def moving_kind(name: str) -> str:
    """The kind of an operator without a FLOP formula."""
    words = set(name.rpartition("::")[2].split("_"))
    return "indexing" if words & _INDEXING else "function" if words & _FUNCTIONS else "elementwise"


@cache
def multiplying_kind(name: str) -> str:
    """The kind of an operator with a FLOP formula, without its dtype."""
    if "attention" in name:
        return "attention"
    if "convolution" in name:
        return "convolution"
    return "recurrence" if "rnn" in name else "product"


def with_blocks(whole: PhaseWork, block: PhaseWork, extra: int) -> dict[str, tuple[OperatorWork, ...]]:
    """Rows with those of one block `extra` times more."""
    return {
        phase: (*own, *(replace(row, times=row.times * extra) for row in block.get(phase, ())))
        for phase, own in whole.items()
    }


def grouped(work: PhaseWork) -> dict[str, tuple[OperatorWork, ...]]:
    """Rows that are alike as one."""
    found: dict[str, tuple[OperatorWork, ...]] = {}
    for phase, own in work.items():
        counts = Counter[OperatorWork]()
        for row in own:
            counts[replace(row, times=0)] += row.times  # type: ignore[assignment]
        found[phase] = tuple(replace(row, times=times) for row, times in counts.items())
    return found


def with_slopes(smaller: PhaseWork, larger: PhaseWork, size: int) -> dict[str, tuple[OperatorWork, ...]]:
    """The rows of a micro-batch of `size` samples with what they grow by, from those of one with a sample more.

    Where other operators ran with more samples, all work grows in proportion.
    """
    return grouped({phase: _grown(own, larger.get(phase, ()), size) for phase, own in smaller.items()})


def _grown(own: Sequence[OperatorWork], more: Sequence[OperatorWork], size: int) -> tuple[OperatorWork, ...]:
    if [row.kind for row in own] != [row.kind for row in more]:
        more = [replace(row, flops=row.flops * (1 + 1 / size), num_bytes=row.num_bytes * (1 + 1 / size)) for row in own]
    return tuple(
        replace(row, flops_per_sample=up.flops - row.flops, bytes_per_sample=up.num_bytes - row.num_bytes)
        for row, up in zip(own, more, strict=True)
    )


def is_aligned(tensors: Iterable[Any]) -> bool:
    """Whether rows of all matrices among tensors begin at multiples of 16 bytes, as fast products need them to."""
    matrices = (one for one in tensors if one.dim() > 1 and min(one.shape[-2:]) > 1 and one.is_floating_point())
    return all(max(one.stride()[-2:]) * one.element_size() % 16 == 0 for one in matrices)


def dtype_of(args: Iterable[Any]) -> str:
    """The dtype of the first floating-point tensor among an operator's arguments; float32 if there is none."""
    for value in args:
        found = dtype_of(value) if isinstance(value, (list, tuple)) else _dtype(value)
        if found:
            return found
    return "float32"


def _dtype(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return str(dtype).removeprefix("torch.") if dtype is not None and dtype.is_floating_point else ""
