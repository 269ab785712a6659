"""What-if arithmetic: from one profile to other choices, without tracing again.

`steady_step` reads the peak of every phase of the second traced step off a profile; the other functions turn one such
record into another and can be chained. Exact are another optimizer and what only moves or divides states; where more is
assumed, the function says so. A change that alters activations (sequence length, checkpointing, precision, attention
kernel) is none of these: profile the model again, which takes a second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightning_memfit.estimate.estimate import CUDA_ROUNDING
from lightning_memfit.estimate.optimizers import OptimizerFamily, optimizer_family
from lightning_memfit.memory import Category, MemoryBreakdown, Tier
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.profile.events import CATEGORIES, EventList
from lightning_memfit.profile.record import ModelProfile, ParameterInfo

_GRADIENT = CATEGORIES.index(Category.GRADIENT)


@dataclass(frozen=True)
class Variant:
    """Live tensor bytes at the peak of every phase of a steady step, by tier and category."""

    phases: Mapping[str, MemoryBreakdown]
    parameters: tuple[ParameterInfo, ...]
    device: str
    """Device type whose operators were traced."""

    @property
    def phase(self) -> str:
        """Phase with the highest peak on the device."""
        return max(self.phases, key=lambda name: self.phases[name].total())

    @property
    def breakdown(self) -> MemoryBreakdown:
        """Bytes at the peak of the step."""
        return self.phases[self.phase]

    @property
    def rounding_bytes(self) -> int:
        """Multiple to which the device's allocator rounds."""
        return DeviceKind.of(self.device).rounding_bytes

    def trained_bytes(self) -> int:
        """Bytes of all trained weights as they are stored, each rounded, tied ones once."""
        unit = self.rounding_bytes
        return sum(-(-p.numel * p.itemsize // unit) * unit for p in trained(self.parameters))


def trained(parameters: Collection[ParameterInfo]) -> list[ParameterInfo]:
    """Trainable parameters, tied ones once."""
    return [p for p in parameters if p.trainable and not p.shared_with]


def steady_step(profile: ModelProfile, micro_batch_size: int | None = None) -> Variant:
    """Peaks of the second traced step, which every later one repeats.

    Args:
        profile: From `profile_module` or `measure_step`.
        micro_batch_size: Samples per micro-batch; the profiled size by default.

    Raises:
        ValueError: If the profile doesn't know that size, or has no second step.
    """
    events = profile.events_at(micro_batch_size)
    unit = profile.device_kind.rounding_bytes
    live = events.live_bytes(unit)
    peaks = {
        name: start + int(live[start:stop].argmax())
        for name, start, stop in sorted(_intervals(events), key=lambda it: int(live[it[1] : it[2]].max()))
    }
    phases = {name: events.breakdown_at(at, unit) for name, at in peaks.items()}
    return Variant(_in_order(phases), profile.parameters, profile.device)


def _in_order(phases: dict[str, MemoryBreakdown]) -> dict[str, MemoryBreakdown]:
    return {name: phases[name] for name in ("forward", "backward", "step") if name in phases}


def _intervals(events: EventList) -> list[tuple[str, int, int]]:
    """`(phase, first event, event after the last)` of the second optimizer step."""
    names = [name for _, name in events.phases]
    first = names.index("step") + 1 if "step" in names else len(names)
    if "forward" not in names[first:]:
        raise ValueError("The profile has no second optimizer step, which is the steady state.")
    starts = [*(at for at, _ in events.phases), len(events)]
    return [
        (name, starts[index], starts[index + 1])
        for index, name in enumerate(names)
        if index >= first and name != "end" and starts[index + 1] > starts[index]
    ]


def with_optimizer(variant: Variant, optimizer: str | OptimizerFamily, keep_32bit: Collection[str] = ()) -> Variant:
    """Another optimizer: its states, and the scratch memory of its step. Exact on CUDA.

    Args:
        variant: Traced with CUDA's operators.
        optimizer: Family.
        keep_32bit: Names of parameters exempt from quantization, such as embeddings under `Optimizer8bit`.

    Raises:
        ValueError: If the family is unknown, or its scratch memory is known to a trace only.
    """
    family = optimizer if isinstance(optimizer, OptimizerFamily) else optimizer_family(optimizer)
    if DeviceKind.of(variant.device).is_host or family.scratch_copies is None:
        where = f"of {family.name}" if family.scratch_copies is None else "on the CPU"
        raise ValueError(f"The scratch memory of a step {where} follows from no formula: profile the model with it.")
    states = family.total_bytes(variant.parameters, variant.rounding_bytes, keep_32bit)
    tier = Tier.HOST if family.paged else Tier.DEVICE
    phases = {
        name: breakdown.replace(Category.OPTIMIZER_STATE, 0).replace(Category.OPTIMIZER_STATE, states, tier)
        for name, breakdown in variant.phases.items()
    }
    if "step" in phases:
        scratch = family.scratch_copies * variant.trained_bytes()
        phases["step"] = phases["step"].replace(Category.TEMPORARY, scratch)
    return replace(variant, phases=phases)


def with_gradient_release(
    profile: ModelProfile, micro_batch_size: int | None = None, optimizer: str | OptimizerFamily = "adamw"
) -> Variant:
    """Every gradient stepped and freed when it is complete, so that they never exist together.

    The scratch memory of stepping a parameter is added to the moment when its gradient is made, when a little of what
    backward no longer needs may still be there: up to 2 % too much for small models, exact for GPT-2.

    Args:
        profile: Traced with CUDA's operators and without accumulation.
        micro_batch_size: Samples per micro-batch; the profiled size by default.
        optimizer: Family that steps.

    Raises:
        ValueError: If the profile accumulates gradients, or the family's scratch memory is unknown.
    """
    if profile.accumulate_grad_batches > 1:
        raise ValueError(
            f"`accumulate_grad_batches={profile.accumulate_grad_batches}`: released gradients can't accumulate."
        )
    family = optimizer if isinstance(optimizer, OptimizerFamily) else optimizer_family(optimizer)
    plain = with_optimizer(steady_step(profile, micro_batch_size), family)
    events = profile.events_at(micro_batch_size)
    rounded = -(-events.sizes // CUDA_ROUNDING) * CUDA_ROUNDING
    is_gradient = events.categories[events.storages] == _GRADIENT
    signed = np.sign(events.events) * rounded[events.storages]
    live = np.cumsum(np.where(is_gradient, 0, signed))
    one = np.where(is_gradient & (events.events > 0), rounded[events.storages], 0)
    phases = {}
    for name, start, stop in _intervals(events):
        at = start + int((live + one * (1 + (family.scratch_copies or 0)))[start:stop].argmax())
        breakdown = events.breakdown_at(at, CUDA_ROUNDING).replace(Category.GRADIENT, int(one[at]))
        temporary = breakdown.get(Category.TEMPORARY) + int(one[at]) * (family.scratch_copies or 0)
        if name == "step":
            temporary = 0
        breakdown = breakdown.replace(Category.TEMPORARY, temporary).replace(Category.OPTIMIZER_STATE, 0)
        tier = Tier.HOST if family.paged else Tier.DEVICE
        states = plain.phases[name].get(Category.OPTIMIZER_STATE, tier)
        phases[name] = breakdown.replace(Category.OPTIMIZER_STATE, states, tier)
    return replace(plain, phases=phases)
