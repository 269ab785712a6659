"""`Cost`: the work that a technique adds to training, in the units that a time model multiplies by a device's rates."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lightning_memfit.memory import Category
from lightning_memfit.memory.parameters import trained
from lightning_memfit.optim.optimizers import find_optimizer

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile


@dataclass(frozen=True)
class Work:
    """Work that is added; negative if a technique saves it. Only `host_seconds` is already time."""

    flops: float = 0.0
    """FLOPs of matrix products on the device."""
    device_bytes: float = 0.0
    """Bytes read from and written to the device's memory."""
    host_link_bytes: float = 0.0
    """Bytes moved between device and pinned host memory, both directions together."""
    disk_bytes: float = 0.0
    """Bytes read from and written to disk."""
    host_seconds: float = 0.0
    """Seconds that one core of the CPU computes, as measured on a core with AVX-512 (`techniques/core/cost.py`)."""
    kernels: float = 0.0
    """Number of kernels launched."""
    interconnect_bytes: float = 0.0
    """Bytes that each device sends to others."""
    host_bytes: float = 0.0
    """Bytes read from and written to host memory while the CPU computes."""
    staged_bytes: float = 0.0
    """Bytes read from and written to the device's memory around an exchange, which no trace of one process shows."""
    disk_written_bytes: float = 0.0
    """The part of `disk_bytes` that is written."""

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Work)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(getattr(self, field.name) * factor for field in fields(Work)))


@dataclass(frozen=True)
class Cost:
    """What a technique adds to the plain run of the same module."""

    micro_batch: Work = Work()
    """Work added to every forward and backward pass."""
    step: Work = Work()
    """Work added to every optimizer step."""
    overlap: bool = False
    """Whether `host_link_bytes` of micro-batches move while the device computes."""
    once_seconds: float = 0.0
    """Seconds before the first step, for compiling."""
    matmul_rate: str = ""
    """Rate in the device catalogue at which fp32 matrix products run instead of `float32`."""
    last_micro_batch: Work = Work()
    """Work added only to the last micro-batch of a step: exchanging gradients as they are completed."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.micro_batch + other.micro_batch,
            self.step + other.step,
            # Traffic of two techniques is hidden only if both hide theirs; a technique without traffic doesn't count.
            _hides(self, other),
            self.once_seconds + other.once_seconds,
            self.matmul_rate or other.matmul_rate,
            self.last_micro_batch + other.last_micro_batch,
        )

    @property
    def moves(self) -> bool:
        """Whether anything goes over the host link."""
        return bool(self.micro_batch.host_link_bytes or self.step.host_link_bytes)


def _hides(first: Cost, second: Cost) -> bool:
    moving = [cost for cost in (first, second) if cost.moves]
    return bool(moving) and all(cost.overlap for cost in moving)


# --- optimizer steps --------------------------------------------------------------------------------------------------

# Traffic counts what an elementwise step reads and writes, by its operators. On the CPU that explains little,
# so records of optimizers have times per parameter of one core (AVX-512), as `benchmarks/optimizer_step` measured them
# with the weights of a GPT-2 of 124 million parameters (`benchmarks/results/optimizer_step_cpu.json`).

FOREACH_PASSES = 20
"""How often batched AdamW (`foreach`, CUDA's default) reads or writes a tensor of a parameter's size."""
FUSED_PASSES = 7
"""Fused AdamW reads weight, gradient and two states, and writes weight and states."""

HOST_STEP_BYTES = 28
"""Bytes of host memory that a fused AdamW step reads and writes per parameter: gradient, weight, two states in fp32."""

ROUNDING_CPU_SECONDS = 7.5e-9
"""Seconds per parameter on one core that widening and stochastic rounding of bfloat16 weights add to fused AdamW."""


def cpu_seconds(optimizer: str) -> float:
    """Seconds per parameter of one step on one core, by the optimizer's record.

    Raises:
        ValueError: If there is no such record, or it has no time.
    """
    seconds = find_optimizer(optimizer).cpu_seconds
    if seconds is None:
        raise ValueError(f"The record of {optimizer} has no `cpu_seconds`, which a plan for the CPU needs.")
    return seconds


def num_trained(profile: ModelProfile) -> int:
    """Number of elements that a step updates."""
    return sum(parameter.numel for parameter in trained(profile.parameters))


def state_bytes(profile: ModelProfile) -> int:
    """Bytes of the plain run's optimizer states, whatever the optimizer."""
    return profile.events.breakdown_at(len(profile.events) - 1).get(Category.OPTIMIZER_STATE)


def other_states(profile: ModelProfile, optimizer: str) -> Work:
    """Work that a step adds or saves with optimizer states of another size.

    Args:
        profile: Profile of the plain step.
        optimizer: Name of the new optimizer's record.
    """
    if profile.device == "cpu":
        return other_cpu_step(profile, optimizer)
    made = find_optimizer(optimizer).states.total_bytes(profile.parameters)
    return Work(device_bytes=2.0 * (made - state_bytes(profile)))


def other_cpu_step(profile: ModelProfile, optimizer: str) -> Work:
    """Work that a step on the CPU adds or saves if another optimizer than batched AdamW steps."""
    return Work(host_seconds=(cpu_seconds(optimizer) - cpu_seconds("adamw")) * num_trained(profile))
