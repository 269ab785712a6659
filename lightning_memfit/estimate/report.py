"""`EstimateReport`: everything `memfit estimate` says about one run, as plain data.

`judge` decides whether an estimate fits its target, and `largest_micro_batch` how large the micro-batch may be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_memfit.device.runtime import RuntimeMemory
from lightning_memfit.estimate.estimate import Estimate, estimate_step, predict_peak_bytes, predict_total_bytes
from lightning_memfit.estimate.target import Target
from lightning_memfit.memory import Tier
from lightning_memfit.profile.record import ModelProfile

if TYPE_CHECKING:
    from lightning_memfit.estimate.division import Division

# --- does a step fit, and how large may its micro-batch be ------------------------------------------------------------


MAX_MICRO_BATCH = 1 << 16
"""Upper end of the search: larger sizes bring nothing."""


@dataclass(frozen=True)
class Verdict:
    """Whether an estimate fits a target."""

    needed_bytes: int
    usable_bytes: int | None
    """Capacity less the safety margin; None where no device is known."""
    host_needed_bytes: int = 0
    """Host memory that all ranks of a machine need beside their devices."""
    host_usable_bytes: int | None = None
    """Host memory that they may use; None where the machine isn't known."""

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if that is unknown."""
        if self.usable_bytes is None:
            return None
        if self.needed_bytes > self.usable_bytes:
            return False
        return self.host_usable_bytes is None or self.host_needed_bytes <= self.host_usable_bytes

    @property
    def exit_code(self) -> int:
        """0 fits, 1 does not, 2 cannot tell."""
        return 2 if self.fits is None else int(not self.fits)

    def to_dict(self) -> dict[str, Any]:
        """Plain figures, ready for JSON."""
        return {"fits": self.fits, **asdict(self)}


def judge(estimate: Estimate, target: Target, division: Division | None = None) -> Verdict:
    """Compare the memory that a step needs (reserved memory and context) with the usable memory of a target.

    Ranks on one machine share its host memory, which on the CPU is all they have.
    """
    off_device = sum(estimate.breakdown.total(tier) for tier in (Tier.PINNED_HOST, Tier.HOST))
    on_machine = division.ranks_per_machine if division is not None else 1
    return Verdict(
        _needed(estimate, target, division),
        target.usable_bytes,
        off_device * on_machine,
        target.host_usable_bytes,
    )


def _needed(estimate: Estimate, target: Target, division: Division | None) -> int:
    if target.counts_tensors:  # of one process
        return estimate.tensor_bytes
    shared = division.ranks_per_machine if division is not None and target.device_kind.is_host else 1
    return estimate.total_bytes * shared


def largest_micro_batch(
    profile: ModelProfile,
    usable_bytes: int,
    runtime: RuntimeMemory | None = None,
    division: Division | None = None,
) -> int:
    """Largest micro-batch whose step fits, at most `MAX_MICRO_BATCH`; 0 if not even one sample does.

    Allocated memory, cheap to predict, bounds the search; the reserved memory of the result was simulated and fits.

    Raises:
        ValueError: If the profile knows one size only.
    """
    context = runtime.context_bytes if runtime is not None else 0

    def may_fit(size: int) -> bool:
        if division is not None:
            from lightning_memfit.estimate.division import predict_rank_bytes

            return predict_rank_bytes(profile, division, size, runtime) <= usable_bytes
        return predict_peak_bytes(profile, size, runtime) + context <= usable_bytes

    def fits(size: int) -> bool:
        if division is not None:
            return _estimate(profile, division, size, runtime).total_bytes <= usable_bytes
        return predict_total_bytes(profile, size, runtime) <= usable_bytes

    bound = 0 if not may_fit(1) else _bisect(may_fit, 1, MAX_MICRO_BATCH)
    if bound == 0 or fits(bound):
        return bound
    # Reserved memory is little more than allocated memory: search down from the bound.
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


# --- the report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EstimateReport:
    """An estimate, its target, and what the figures rest on."""

    profile: ModelProfile
    estimate: Estimate
    target: Target
    verdict: Verdict
    largest_micro_batch: int | None
    """None if it isn't known: without a device or with a profile of one size."""
    notes: tuple[str, ...] = ()
    """What the figures leave out or rest on, one sentence each."""
    division: Division | None = None
    """How the run's strategy divides it, if the figures are those of one of several ranks or of DeepSpeed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        profile = self.profile
        return {
            "model": profile.name,
            "num_parameters": profile.num_parameters,
            "num_trainable": profile.num_trainable,
            "micro_batch_size": self.estimate.micro_batch_size,
            "accumulate_grad_batches": profile.accumulate_grad_batches,
            "sequence_length": profile.sequence_length,
            "precision": profile.precision,
            "optimizer": profile.optimizer,
            "device": self.target.to_dict(),
            "strategy": None if self.division is None else self.division.to_dict(),
            "verdict": self.verdict.to_dict(),
            "largest_micro_batch_size": self.largest_micro_batch,
            "peak": self.estimate.to_dict(),
            "profile": {
                "method": "measured" if profile.measured else "traced",
                "operators": profile.device,
                "block_class": profile.block_class,
                "num_blocks": profile.num_blocks,
                "traced_blocks": profile.traced_blocks,
                "attention_kernels": dict(profile.attention_kernels),
                "flops": dict(profile.flops),
                "only_this_size": profile.only_this_size,
                "seconds": round(profile.seconds, 3),
                "versions": dict(profile.versions),
            },
            "notes": list(self.notes),
        }


def build_report(
    profile: ModelProfile,
    target: Target,
    micro_batch_size: int | None = None,
    notes: tuple[str, ...] = (),
    division: Division | None = None,
    waiting_bytes: int = 0,
) -> EstimateReport:
    """Estimate a profiled step on a target.

    Raises:
        ValueError: If that micro-batch size isn't known.
        NotDividedError: If what a rank needs can't be told from the profile.
    """
    estimate = _estimate(profile, division, micro_batch_size, target.runtime).beside(waiting_bytes)
    largest = None
    if profile.knows_every_size and target.usable_bytes is not None:
        shared = division.ranks_per_machine if division is not None and target.device_kind.is_host else 1
        usable = target.usable_bytes // (1 if target.counts_tensors else shared)
        largest = largest_micro_batch(profile, usable - waiting_bytes, target.runtime, division)
    verdict = judge(estimate, target, division)
    return EstimateReport(profile, estimate, target, verdict, largest, (*notes, *_rests_on(profile)), division)


def _estimate(
    profile: ModelProfile, division: Division | None, micro_batch_size: int | None, runtime: RuntimeMemory | None
) -> Estimate:
    if division is None:
        return estimate_step(profile, micro_batch_size, runtime)
    from lightning_memfit.estimate.division import estimate_rank  # most estimates are of one device

    return estimate_rank(profile, division, micro_batch_size, runtime)


def _rests_on(profile: ModelProfile) -> list[str]:
    notes = [*profile.cautions, *(f"Assumed: {assumption}." for assumption in profile.assumptions)]
    if profile.measured:
        notes.append("Measured on the CPU in real steps: CUDA kernels may allocate otherwise.")
    return notes
