"""What optimizer steps cost, for the records of those that change them.

Traffic counts what an elementwise step reads and writes, by the operators of each step. On the CPU it explains little,
so there stand times per parameter of one core (AVX-512), as `benchmarks/optimizer_step` measured them with the weights
of a GPT-2 of 124 million parameters (`benchmarks/results/optimizer_step_cpu.json`); a test holds them to that file.
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
    "adamw": 4.4e-9,
    "adamw_fused": 6.0e-10,
    "adamw_8bit": 2.4e-8,
    "adafactor": 6.3e-9,
    "lion": 8.1e-9,
    "lion_8bit": 1.6e-8,
    "torchao_8bit": 2.9e-8,
    "torchao_4bit": 4.6e-8,
    "torchao_fp8": 7.8e-9,
}
"""Seconds per parameter of one step on one core; torch's AdamW, then bitsandbytes', then torchao's compiled ones. The
last three are of a single run by hand, with 50 million parameters, of which no record is kept."""
ROUNDING_CPU_SECONDS = 7.5e-9
"""What widening and stochastic rounding of bfloat16 weights add to fused AdamW, per parameter, on one core."""


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
