"""What optimizer steps cost, for the records of those that change them.

Traffic counts what an elementwise step reads and writes. On the CPU it explains little, so times per parameter and core
stand there as measured with 50 million parameters (AVX-512, `benchmarks/techniques`).
"""

from lightning_memfit.estimate.optimizers import OptimizerFamily
from lightning_memfit.estimate.variants import trained
from lightning_memfit.memory import Category
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.cost import Work

FOREACH_PASSES = 20
"""Times that batched AdamW (`foreach`, CUDA's default) reads or writes a tensor of a parameter's size."""
FUSED_PASSES = 7
"""Weight, gradient and two states read, weight and states written."""

CPU_SECONDS: dict[str, float] = {
    "adamw": 0.26 / 50e6,
    "adamw_fused": 0.038 / 50e6,
    "adamw_8bit": 1.19 / 50e6,
    "adafactor": 0.40 / 50e6,
    "lion": 0.40 / 50e6,
    "lion_8bit": 0.64 / 50e6,
    "torchao_8bit": 1.43 / 50e6,
    "torchao_4bit": 2.32 / 50e6,
    "torchao_fp8": 0.39 / 50e6,
}
"""Seconds per parameter of one step on one core; torch's AdamW, then bitsandbytes', then torchao's compiled ones."""


def num_trained(profile: ModelProfile) -> int:
    """Elements that a step updates."""
    return sum(parameter.numel for parameter in trained(profile.parameters))


def state_bytes(profile: ModelProfile) -> int:
    """Bytes of the plain run's optimizer states, whatever the optimizer."""
    return profile.events.breakdown_at(len(profile.events) - 1).get(Category.OPTIMIZER_STATE)


def other_states(profile: ModelProfile, family: OptimizerFamily, cpu: str) -> Work:
    """Work that a step saves or adds with states of another size.

    Args:
        profile: Of the plain step.
        family: Of the new optimizer.
        cpu: Its name in `CPU_SECONDS`.
    """
    if profile.device == "cpu":
        return Work(host_seconds=(CPU_SECONDS[cpu] - CPU_SECONDS["adamw"]) * num_trained(profile))
    return Work(device_bytes=2.0 * (family.total_bytes(profile.parameters) - state_bytes(profile)))
