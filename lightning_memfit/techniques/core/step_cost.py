"""What steps of optimizers cost, beside that of batched AdamW.

Traffic counts what an elementwise step reads and writes, by its operators. On the CPU that explains little, so records
of optimizers have times per parameter of one core (AVX-512), as `benchmarks/optimizer_step` measured them with the
weights of a GPT-2 of 124 million parameters (`benchmarks/results/optimizer_step_cpu.json`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memfit.memory.parameters import trained
from lightning_memfit.optim.optimizers import find_optimizer
from lightning_memfit.techniques.core.cost import Work

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile

FOREACH_PASSES = 20
"""How often batched AdamW (`foreach`, CUDA's default) reads or writes a tensor of a parameter's size."""
_FUSED_PASSES = 7
"""Fused AdamW reads weight, gradient and two states, and writes weight and states."""

_TENSOR_KERNELS, _FACTORED_KERNELS = 2.5, 5.5
"""What stepping a tensor by itself costs the program on CUDA, in launches: bitsandbytes' 51 to 81 us, and 137 us of
torch's Adafactor, on an H200 (docs/benchmarks/gpu.md)."""

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


def cpu_step_seconds(optimizer: str, profile: ModelProfile) -> float:
    """Seconds of one step over what a profile's module trains, on one core."""
    tensors = len(trained(profile.parameters))
    return cpu_seconds(optimizer) * num_trained(profile) + find_optimizer(optimizer).cpu_tensor_seconds * tensors


def num_trained(profile: ModelProfile) -> int:
    """Number of elements that a step updates."""
    return sum(parameter.numel for parameter in trained(profile.parameters))


def state_bytes(profile: ModelProfile) -> int:
    """Bytes of the plain run's optimizer states, whatever the optimizer."""
    from lightning_memfit.memory import Category  # which plans alone need, and runs of optimizers load this file, too

    return profile.events.breakdown_at(len(profile.events) - 1).get(Category.OPTIMIZER_STATE)


def other_states(profile: ModelProfile, optimizer: str) -> Work:
    """Work that a step adds or saves with optimizer states of another size."""
    if profile.device == "cpu":
        return other_cpu_step(profile, optimizer)
    record, stepped = find_optimizer(optimizer), trained(profile.parameters)
    made = record.states.total_bytes(profile.parameters)
    alone = record.package == "bitsandbytes"
    kernels = _FACTORED_KERNELS if record.states.factored else _TENSOR_KERNELS if alone else 0.0
    return Work(device_bytes=2.0 * (made - state_bytes(profile)), kernels=kernels * len(stepped))


def fusing(profile: ModelProfile, optimizer: str) -> Work:
    """Work that a step saves with one kernel, and the same states."""
    if profile.device == "cpu":
        return other_cpu_step(profile, optimizer)
    return Work(device_bytes=-4.0 * (FOREACH_PASSES - _FUSED_PASSES) * num_trained(profile))


def other_cpu_step(profile: ModelProfile, optimizer: str) -> Work:
    """Work that a step on the CPU adds or saves if another optimizer than batched AdamW steps."""
    return Work(host_seconds=cpu_step_seconds(optimizer, profile) - cpu_step_seconds("adamw", profile))
