"""Does a step fit a device, and how large may its micro-batch be? Pure functions over a profile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_memfit.device.runtime import RuntimeMemory
from lightning_memfit.estimate.estimate import Estimate, predict_peak_bytes, predict_total_bytes
from lightning_memfit.estimate.target import Target
from lightning_memfit.profile.record import ModelProfile

MAX_MICRO_BATCH = 1 << 16
"""Where the search ends: nothing is gained beyond."""


@dataclass(frozen=True)
class Verdict:
    """Whether an estimate fits a target."""

    needed_bytes: int
    usable_bytes: int | None
    """Capacity less the safety margin; None where no device is known."""

    @property
    def fits(self) -> bool | None:
        """None where it can't be told."""
        return None if self.usable_bytes is None else self.needed_bytes <= self.usable_bytes

    @property
    def exit_code(self) -> int:
        """0 fits, 1 does not, 2 cannot tell."""
        return 2 if self.fits is None else int(not self.fits)

    def to_dict(self) -> dict[str, Any]:
        """Plain figures, ready for JSON."""
        return {"fits": self.fits, "needed_bytes": self.needed_bytes, "usable_bytes": self.usable_bytes}


def judge(estimate: Estimate, target: Target) -> Verdict:
    """Hold what a step needs (reserved memory and context) against what a target has to give."""
    return Verdict(estimate.total_bytes, target.usable_bytes)


def largest_micro_batch(profile: ModelProfile, usable_bytes: int, runtime: RuntimeMemory | None = None) -> int:
    """Largest micro-batch whose step fits, at most `MAX_MICRO_BATCH`; 0 if not even one sample does.

    Allocated memory, cheap to predict, bounds the search; the reserved memory of the result was simulated and fits.

    Args:
        profile: A profile that knows every size.
        usable_bytes: What a step may need in all, context included.
        runtime: What lies outside the trace on a CUDA device.

    Raises:
        ValueError: If the profile knows one size only.
    """
    context = runtime.context_bytes if runtime is not None else 0

    def may_fit(size: int) -> bool:
        return predict_peak_bytes(profile, size, runtime) + context <= usable_bytes

    def fits(size: int) -> bool:
        return predict_total_bytes(profile, size, runtime) <= usable_bytes

    bound = 0 if not may_fit(1) else _bisect(may_fit, 1, MAX_MICRO_BATCH)
    if bound == 0 or fits(bound):
        return bound
    # What is reserved is little more than what is allocated: search down from the bound.
    too_large, step = bound, 1
    while (size := max(1, too_large - step)) < too_large and not fits(size):
        too_large, step = size, 2 * step
    return 0 if too_large == 1 else _bisect(fits, size, too_large - 1)


def _bisect(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Largest integer in `low..high` for which `holds`, true at `low`, is true."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
