"""What the model of memory says of a measured case. Nothing is trained."""

from functools import cache
from typing import Any

import torch

from benchmarks.offload_host_memory.cases import KINDS, SEQUENCE_LENGTH, config_of
from lightning_memfit.estimate.zero_moments import ZeroRun, zero_moments
from lightning_memfit.memory import MemoryBreakdown
from lightning_memfit.models.architecture import build, resolve_config
from lightning_memfit.nvme.sizing import AioSettings, infinity_sizes
from lightning_memfit.profile.record import ParameterInfo
from lightning_memfit.profile.step import parameter_table
from lightning_memfit.strategies.zero_sizes import ModelSizes, sized


def predict(row: dict[str, Any]) -> dict[str, MemoryBreakdown]:
    """Moments of a rank of a measured row, which names its case and its activations."""
    return zero_moments(run_of(row["kind"], row["size"], row["ranks"], row["precision"], row["activation_bytes"]))


def run_of(kind: str, size: str, ranks: int, precision: str, activation_bytes: int) -> ZeroRun:
    """The case as the strategies would describe it."""
    return _run(kind, config_of(size), ranks, precision, activation_bytes)


def gpt2_xl_run() -> ZeroRun:
    """GPT-2 XL's true architecture with parameters and optimizer on disk, as `benchmarks/gpt2xl_zero_infinity`."""
    config = config_of("124M") | {"n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024}
    return _run("disk_both", config, 1, "bf16-mixed", 0)


def _run(kind: str, config: dict[str, Any], ranks: int, precision: str, activation_bytes: int) -> ZeroRun:
    parameters, per_module = _shapes(tuple(config.items()))
    itemsize = 2 if precision.startswith("bf16") else 4
    numels = [p.numel for p in parameters if not p.shared_with]
    arguments = KINDS[kind]
    from_disk = kind.startswith("disk")
    stage = 3 if from_disk else arguments["stage"]
    place = "nvme" if from_disk else "cpu"
    offload = {
        name: place if arguments.get(name, from_disk) else "none"
        for name in ("offload_optimizer", "offload_parameters")
    }
    zero = sized({"stage": stage}, ModelSizes(sum(numels), max(numels)), ranks)
    aio = AioSettings()
    large = aio.min_swapped_bytes // itemsize * ranks
    most = max(sum(numel >= large for numel in module) for module in per_module)
    return ZeroRun(
        parameters,
        stage,
        ranks,
        itemsize,
        bucket_size=zero["reduce_bucket_size"],
        sub_group_size=zero.get("sub_group_size", 0),
        live_parameters=zero.get("stage3_max_live_parameters", 0),
        sizes=infinity_sizes([numels], ranks, itemsize, aio, params_per_module=most) if from_disk else None,
        on_cpu=True,
        activation_bytes=activation_bytes,
        **offload,
    )


@cache
def _shapes(config: tuple[tuple[str, Any], ...]) -> tuple[tuple[ParameterInfo, ...], tuple[tuple[int, ...], ...]]:
    """Parameters of a GPT-2, and elements of those that each submodule owns itself."""
    with torch.device("meta"):
        model = build(resolve_config(None, None, dict(config)), None, "sdpa")
    owned = (tuple(p.numel() for p in child.parameters(recurse=False)) for child in model.modules())
    return parameter_table(model), tuple(numels for numels in owned if numels)


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
