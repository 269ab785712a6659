"""Compare what two runs of the same code computed, of which only a few numbers are kept in between.

Random projections of a tensor tell it from any other: equal tensors have equal ones, and those of two others differ by
about as much, relative to their size, as the tensors do. They are count sketches: Charikar, Chen, Farach-Colton,
"Finding frequent items in data streams", 2002.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

NUM_PROJECTIONS = 32
CHUNK = 1 << 18
"""Elements that are projected at a time."""

EQUAL = 1e-12
"""Largest relative difference of projections of equal tensors: float64 sums of memory that is aligned otherwise."""

_NUM_REPEATS = 3
_MOST_NOISE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest relative difference between two equal runs that counts as rounding; of half precision `_HALF_NOISE`."""

_HALF_NOISE = 5e-2


class Reading:
    """Projections of some tensors: of what a run returned, or of the gradients that it gave.

    Args:
        names: What each tensor is called.
        tensors: The tensors; None for a gradient that there is none of.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
        self.names = list(names)
        self.values = [None if tensor is None else projected(tensor) for tensor in tensors]

    def difference(self, other: "Reading") -> tuple[float, str]:
        """Largest relative difference to another reading, and the name of what differs most."""
        worst = (0.0, "")
        for name, one, two in zip(self.names, self.values, other.values, strict=True):
            if one is None or two is None:
                # Without a gradient is the same as with one of zeros.
                only = two if one is None else one
                found = 0.0 if only is None or not bool(only.any()) else math.inf
            else:
                found = relative_difference(one, two)
            worst = max(worst, (found, name))
        return worst


def relative_difference(one: Tensor, two: Tensor) -> float:
    """Difference of two projections, relative to the larger; infinite where only one is finite."""
    same = (one == two) | (one.isnan() & two.isnan())
    if bool(same.all()):
        return 0.0
    difference = (one - two).norm() / max(float(one.norm()), float(two.norm()), 1e-300)
    return math.inf if not math.isfinite(difference) else float(difference)


def projected(tensor: Tensor) -> Tensor:
    """Some random projections of a tensor, on the host and in float64."""
    with _disable_current_modes(), torch.no_grad():  # a few hundred KiB that are no memory of the step
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # this rank's part of a `DTensor`
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
        total = torch.zeros(NUM_PROJECTIONS, dtype=dtype, device=tensor.device)
        for number, part in enumerate(tensor.detach().reshape(-1).split(CHUNK)):
            signed = part.to(dtype) * signs(tensor.device)[: len(part)]
            padded = nn.functional.pad(signed, (0, -len(part) % NUM_PROJECTIONS))
            total += (1 if number.bit_count() % 2 else -1) * padded.view(-1, NUM_PROJECTIONS).sum(0)
        return total.cpu().double()


def signs(device: torch.device) -> Tensor:
    """Random signs for a chunk of elements. What is kept of them is on the host, and no tensor: steps are measured."""
    return torch.from_numpy(_signs()).to(device)


@cache
def _signs() -> Any:
    return numpy.random.default_rng(0).integers(0, 2, CHUNK, dtype=numpy.int8) * 2 - 1


def explain_difference(
    first: Reading, again: Callable[[], Reading], dtype: torch.dtype | None, device: torch.device
) -> str | None:
    """Compare a run with a repetition, of which more are made where the two differ.

    Args:
        first: The run.
        again: Repeats it.
        dtype: Type in which it computes.
        device: Where it runs. Off the CPU, differences of one unit of rounding are none.

    Returns:
        What differs most, and by how much; None if the two differ by no more than twice the difference between
        repetitions, and these by no more than rounding.
    """
    other = again()
    error, what = first.difference(other)
    if error <= EQUAL:
        return None
    if math.isfinite(error):
        noise = max(other.difference(again())[0] for _ in range(_NUM_REPEATS))
        floor = 0.0 if device.type == "cpu" or dtype is None else torch.finfo(dtype).eps
        most = _HALF_NOISE if dtype is None else _MOST_NOISE.get(dtype, _HALF_NOISE)
        if noise <= most and error <= max(2 * noise, floor):
            return None
    return f"{what} was another (relative difference {error:.1e})"
