"""What the model of memory says of a measured case. Nothing is trained."""

from functools import cache
from typing import Any

import torch

from benchmarks.offload_host_memory.cases import KINDS, SEQUENCE_LENGTH, config_of
from lightning_memfit.estimate.deepspeed import DeepSpeedMemory, DeepSpeedRun, OffloadTarget, deepspeed_memory
from lightning_memfit.estimate.division import Division
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.models.architecture import build, resolve_config


def predict(row: dict[str, Any]) -> DeepSpeedMemory:
    """What a rank of a measured row takes, which names its case and its activations."""
    return deepspeed_memory(run_of(row["kind"], row["size"], row["ranks"], row["precision"], row["activation_bytes"]))


def run_of(kind: str, size: str, ranks: int, precision: str, activation_bytes: int) -> DeepSpeedRun:
    """The case as the strategies would describe it."""
    return _run(kind, config_of(size), ranks, precision, activation_bytes)


def _run(kind: str, config: dict[str, Any], ranks: int, precision: str, activation_bytes: int) -> DeepSpeedRun:
    arguments, from_disk = KINDS[kind], kind.startswith("disk")
    place: OffloadTarget = "nvme" if from_disk else "cpu"
    places: list[OffloadTarget] = [
        place if arguments.get(name, from_disk) else "none" for name in ("offload_optimizer", "offload_parameters")
    ]
    division = Division(kind, arguments.get("stage", 3), ranks, ranks, True, *places)
    itemsize = 2 if precision.startswith("bf16") else 4
    parameters = parameters_of(tuple(config.items()))
    return division.run_of(parameters, itemsize, on_cpu=True, activation_bytes=activation_bytes)


@cache
def parameters_of(config: tuple[tuple[str, Any], ...]) -> tuple[ParameterInfo, ...]:
    """Parameters of a GPT-2."""
    with torch.device("meta"):
        return parameter_table(build(resolve_config(None, None, dict(config)), None, "sdpa"))


@cache
def activation_bytes(size: str, precision: str) -> int:
    """Peak of activations and temporary tensors in one micro-batch, from a trace of a step without any sharding."""
    from lightning_memfit import CausalLM, RandomTokens
    from lightning_memfit.memory import Category
    from lightning_memfit.profile.build import profile_module
    from lightning_memfit.profile.step import StepOptions
    from lightning_memfit.profile.trace import Emulation

    config = config_of(size)
    data = RandomTokens(1, SEQUENCE_LENGTH, batch_size=1, vocab_size=config["vocab_size"])
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    options = StepOptions("bf16-true" if precision.startswith("bf16") else precision)  # as DeepSpeed keeps its weights
    module = CausalLM(config=config, learning_rate=1e-4)
    profile = profile_module(module, batch, options, Emulation(device="cpu"), any_micro_batch=False)
    starts = [at for at, _ in profile.events.phases]
    index = max(index for index, (_, name) in enumerate(profile.events.phases) if name == "forward")
    start, stop = starts[index], starts[index + 1]  # of the second step, which every later one repeats
    peak = profile.events.breakdown_at(start + int(profile.events.live_bytes()[start:stop].argmax()))
    return sum(peak.get(category) for category in (Category.ACTIVATION, Category.TEMPORARY))
