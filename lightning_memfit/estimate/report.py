"""`EstimateReport`: everything `memfit estimate` says about one run, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_memfit.estimate.estimate import Estimate, estimate_step
from lightning_memfit.estimate.fits import Verdict, judge, largest_micro_batch
from lightning_memfit.estimate.target import Target
from lightning_memfit.profile.record import ModelProfile


@dataclass(frozen=True)
class EstimateReport:
    """An estimate, the target it was held against and what it rests on."""

    profile: ModelProfile
    estimate: Estimate
    target: Target
    verdict: Verdict
    largest_micro_batch: int | None
    """None where it isn't known: no device, or a profile of one size."""
    notes: tuple[str, ...] = ()
    """What the figures leave out or rest on, one sentence each."""

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
) -> EstimateReport:
    """Estimate a profiled step on a target.

    Args:
        profile: The step.
        target: Where it shall run.
        micro_batch_size: Samples per micro-batch; the profiled size by default.
        notes: What else to say.

    Raises:
        ValueError: If that micro-batch size isn't known.
    """
    estimate = estimate_step(profile, micro_batch_size, target.runtime)
    largest = None
    if profile.knows_every_size and target.usable_bytes is not None:
        largest = largest_micro_batch(profile, target.usable_bytes, target.runtime)
    return EstimateReport(profile, estimate, target, judge(estimate, target), largest, (*notes, *_assumed(profile)))


def _assumed(profile: ModelProfile) -> list[str]:
    notes = [f"Assumed: {assumption}." for assumption in profile.assumptions]
    if profile.measured:
        notes.append("Measured on the CPU in two real steps: CUDA kernels may allocate otherwise.")
    return notes
