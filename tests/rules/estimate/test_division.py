"""One rank of a divided run, against every committed measurement of such runs."""

import json
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from benchmarks.host_memory.cases import KINDS, SEQUENCE_LENGTH, config_of
from lightning_memfit import CausalLM, RandomTokens, ReplaceOptimizer
from lightning_memfit.device.runtime import runtime_memory
from lightning_memfit.estimate.deepspeed import deepspeed_memory
from lightning_memfit.estimate.division import (
    MODELLED_AS,
    Division,
    NotDividedError,
    division_in_plans,
    division_of,
    estimate_rank,
    traced_run,
)
from lightning_memfit.estimate.report import build_report, judge, largest_micro_batch
from lightning_memfit.estimate.target import Target, host_target
from lightning_memfit.memory import GIB, MIB, Category, Tier
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.kernels import KernelMemory
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.strategies import DataParallelStrategy, FullyShardedStrategy, ZeroStrategy
from lightning_memfit.techniques.core.registry import find_technique

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
ZERO_STAGES = ("zero_1", "zero_2", "zero_3", "zero_offload", "zero_3_offload")
BETWEEN_STEPS = json.loads((RESULTS / "strategies_cpu.json").read_text())
KEPT = {row["strategy"]: row for row in BETWEEN_STEPS["rows"]}
HOST_MEMORY = json.loads((RESULTS / "offload_host_memory.json").read_text())["rows"]


def division(name: str, ranks: int = 2) -> Division:
    sharding = find_technique(name).sharding
    assert sharding is not None
    return sharding.division(name, ranks, ranks)


@cache
def profile_of(
    config: str, precision: str, length: int = 64, size: int = 1, device: Any = "cpu", ranks: Ranks | None = None
) -> ModelProfile:
    made = json.loads(config)
    data = RandomTokens(size, length, batch_size=size, vocab_size=made["vocab_size"])
    data.setup("fit")
    module, batch = CausalLM(config=made, learning_rate=1e-4), next(iter(data.train_dataloader()))
    options: Any = StepOptions(precision)  # type: ignore[arg-type]
    return profile_module(module, batch, options, Emulation(device), ranks=ranks)


def measured_stage(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "zero_stages_cpu_small" / f"{name}.json").read_text())
    return found


def stage_profile(precision: str, device: Any = "cpu") -> ModelProfile:
    model = measured_stage("ddp")["settings"]["model"]["init_args"]
    return profile_of(json.dumps(model["config"]), precision, device=device)


@pytest.mark.parametrize("name", ZERO_STAGES)
def test_the_peak_of_a_rank_is_that_measured(name: str) -> None:
    """Live tensors and the growth of resident memory."""
    found, measured = estimate_rank(stage_profile("bf16-true"), division(name)), measured_stage(name)["measured"]
    assert -0.05 <= found.allocated_bytes / measured["allocated_bytes"] - 1 <= 0.05
    assert -0.05 <= found.total_bytes / measured["rss_growth_bytes"] - 1 <= 0.05
    assert found.breakdown.total() == found.total_bytes
    assert found.by_phase[found.phase] == found.allocated_bytes


@pytest.mark.nightly
def test_the_peak_of_ddp_is_that_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new buckets are made beside the old ones, which no trace of one device shows.

    Only live tensors were measured: what bf16 kernels take beside their results depends on the processor.
    """
    monkeypatch.setattr(KernelMemory, "of", lambda *_: None)
    profile_of.cache_clear()
    model = measured_stage("ddp")["settings"]["model"]["init_args"]
    ranks = Ranks(partial(DataParallelStrategy, process_group_backend="gloo"), 2)
    found = estimate_rank(profile_of(json.dumps(model["config"]), "bf16-mixed", ranks=ranks), division("ddp"))
    assert found.allocated_bytes == pytest.approx(measured_stage("ddp")["measured"]["allocated_bytes"], rel=1e-4)
    assert found.breakdown.total() == found.total_bytes
    profile_of.cache_clear()


@pytest.mark.nightly_cases("zero_1")
@pytest.mark.parametrize("name", [name for name in KEPT if name not in ("ddp", "fsdp2")])
def test_bytes_between_steps_are_those_measured(name: str) -> None:
    profile = profile_of(json.dumps(BETWEEN_STEPS["config"]), "bf16-true")
    memory = deepspeed_memory(traced_run(profile, division(name, BETWEEN_STEPS["ranks"])))
    kept = memory.kept
    tensors = sum(kept.total(tier) for tier in memory.host_tiers) - kept.get(Category.RUNTIME_CONTEXT, Tier.HOST)
    assert tensors == pytest.approx(KEPT[name]["live_bytes"], rel=0.05)
    on_disk = BETWEEN_STEPS["ranks"] * kept.total(Tier.DISK)
    assert on_disk == pytest.approx(KEPT[name]["disk_bytes"], rel=0.05)


@pytest.mark.nightly_cases(
    "disk_both-326M",
    "zero_3-42M",
    "disk_both-42M",
    "zero_2-124M-1",
    "zero_2-42M-1_0",
    "zero_2-42M-1_1",
    "zero_2-8M-1",
    "zero_3-124M-1",
)
@pytest.mark.parametrize("row", HOST_MEMORY, ids=lambda row: f"{row['kind']}-{row['size']}-{row['ranks']}")
def test_the_host_memory_of_a_rank_is_that_measured(row: dict[str, Any]) -> None:
    half = row["precision"].startswith("bf16")
    profile = profile_of(json.dumps(config_of(row["size"])), "bf16-true" if half else "32-true", SEQUENCE_LENGTH)
    from_disk, arguments = row["kind"].startswith("disk"), KINDS[row["kind"]]
    place = "nvme" if from_disk else "cpu"
    places: list[Any] = [
        place if arguments.get(key, from_disk) else "none" for key in ("offload_optimizer", "offload_parameters")
    ]
    divided = Division(row["kind"], arguments.get("stage", 3), row["ranks"], row["ranks"], True, *places)
    peak = deepspeed_memory(traced_run(profile, divided, row["activation_bytes"])).host_peak_bytes
    assert -0.05 <= peak / row["peak_bytes"] - 1 <= 0.05


# --- what follows from it ---------------------------------------------------------------------------------------------


def test_more_ranks_need_less_and_larger_batches_more() -> None:
    profile, runtime = stage_profile("bf16-true", "cuda"), runtime_memory((8, 0))
    two, four = (estimate_rank(profile, division("zero_3", ranks), 1, runtime).total_bytes for ranks in (2, 4))
    assert four < two < estimate_rank(profile, division("zero_3"), 64, runtime).total_bytes
    usable = 2 * GIB
    largest = largest_micro_batch(profile, usable, runtime, division("zero_3"))
    for size, fits in ((largest, True), (largest + 1, False)):
        assert (estimate_rank(profile, division("zero_3"), size, runtime).total_bytes <= usable) is fits


@pytest.mark.nightly
def test_ranks_share_the_memory_of_their_machine() -> None:
    profile = stage_profile("bf16-true")
    report = build_report(profile, Target("cpu", "cpu", 300 * MIB), division=division("zero_2", 2))
    assert report.verdict.needed_bytes == 2 * report.estimate.total_bytes
    limited = build_report(profile, host_target(300 * MIB), division=division("zero_2", 2))
    assert limited.verdict.needed_bytes == report.estimate.allocated_bytes  # a limit on one process's tensors
    on_gpu = stage_profile("bf16-true", "cuda")
    card = Target("card", "cuda", 80 * GIB, runtime=runtime_memory((8, 0)))
    offloaded = estimate_rank(on_gpu, division("zero_offload"), None, card.runtime)
    verdict = judge(offloaded, card, division("zero_offload"))
    assert verdict.fits
    assert verdict.host_needed_bytes == 2 * offloaded.breakdown.total(Tier.HOST)
    small = Target("card", "cuda", 80 * GIB, runtime=card.runtime, host_usable_bytes=verdict.host_needed_bytes - 1)
    assert judge(offloaded, small, division("zero_offload")).fits is False


class Configured(DeepSpeedStrategy):
    def __init__(self, config: dict[str, Any] | None = None, **zero: Any) -> None:  # without DeepSpeed
        self.config = {**(config or {}), "zero_optimization": zero}


def test_strategies_say_what_they_divide() -> None:
    assert division_of(SingleDeviceStrategy("cpu"), "auto", 1, 1) is None
    assert division_of(DDPStrategy(), "ddp", 4, 2) == Division("ddp", 0, 4, 2, copies_gradients=True)
    assert division_of(DDPStrategy(gradient_as_bucket_view=True), "ddp", 2, 2) == Division("ddp", 0, 2, 2)
    assert division_of(ModelParallelStrategy(), "fsdp2", 4, 2) == Division("fsdp2", 3, 4, 2)
    cpu = {"device": "cpu", "pin_memory": True}
    found = division_of(Configured(stage=3, offload_optimizer=cpu, sub_group_size=1e6), "x", 4, 2)
    sizes = {"sub_group_size": 1_000_000, "reduce_bucket_size": 500_000_000}
    sizes |= {"stage3_max_live_parameters": 1_000_000_000}
    assert found == Division("x", 3, 4, 2, True, "cpu", pin_memory=True, sizes=sizes)
    ours = Configured(stage=3, sub_group_size=1e6)
    ours.chooses_sizes = True
    assert division_of(ours, "x", 4, 2) == Division("x", 3, 4, 2, True, sizes={"sub_group_size": 1_000_000})


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_sizes_of_another_strategy_are_deepspeed_s() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    made = DeepSpeedZeroConfig(stage=3).model_dump(by_alias=True)
    found = division_of(Configured(stage=3), "x", 4, 2)
    assert found is not None
    assert found.sizes == {key: made[key] for key in found.sizes}
    assert len(found.sizes) == 3
    # What is refused beside its default has that default.
    options = {path.removeprefix("zero_optimization."): value for path, value in MODELLED_AS.items()}
    assert {key: options[key] for key in options if key in made} == {key: made[key] for key in options if key in made}
    assert division_of(ZeroStrategy(stage=3), "x", 4, 2) == Division("x", 3, 4, 2, True)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (FSDPStrategy(), "unknown what it keeps"),
        (Configured(stage=0), "stage 0"),
        (Configured(stage=3, offload_param={"device": "nvme"}), "for `memfit_zero_infinity` only"),
        (Configured(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.3}), "`ratio`"),
        (Configured(stage=3, zero_hpz_partition_size=8), "`zero_optimization.zero_hpz_partition_size=8`"),
        (Configured(stage=3, stage3_param_persistence_threshold=10_000_000), "persistence_threshold=10000000`"),
        (Configured({"data_types": {"grad_accum_dtype": "fp32"}}, stage=3), "`data_types.grad_accum_dtype=fp32`"),
        (Configured({"communication_data_type": "fp32"}, stage=3), "`communication_data_type=fp32`"),
    ],
)
def test_what_is_not_modelled_is_refused(strategy: Any, reason: str) -> None:
    with pytest.raises(NotDividedError, match=reason):
        division_of(strategy, "x", 2, 2)


def test_plans_are_for_weights_gathered_as_they_are_stored() -> None:
    assert division_in_plans(FullyShardedStrategy(), "fsdp2", 2, 2) == Division("fsdp2", 3, 2, 2)
    with pytest.raises(NotDividedError, match="with its own arguments"):
        division_in_plans(FullyShardedStrategy(gather_dtype="bfloat16"), "fsdp2", 2, 2)


class OneMatrix(pl.LightningModule):
    def __init__(self, make: Any, rows: int = 256, columns: int = 96) -> None:
        super().__init__()
        self.make = make
        self.linear = torch.nn.Linear(columns, rows, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.linear(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("shape", [(256, 256), (2048, 8)])
def test_factors_of_matrices_are_refused_whatever_their_size(shape: tuple[int, int], precision: Any) -> None:
    """Those of 256 x 256 are as large as scales of 8-bit states, those of 2048 x 8 (an adapter) as states of 4 bits."""
    module = OneMatrix(torch.optim.Adafactor, *shape)
    batch = torch.zeros(4, shape[1])
    profile = profile_module(module, batch, StepOptions(precision), any_micro_batch=False)
    with pytest.raises(NotDividedError, match="no fixed number of values per element"):
        estimate_rank(profile, division("zero_2"))


@pytest.mark.parametrize(
    ("package", "name", "expected"),
    [
        ("torchao", "AdamW4bit", 1 + 8 / 128),
        ("bitsandbytes", "AdamW8bit", 2 + 8 / 256),
        ("bitsandbytes", "AdEMAMix8bit", 3 + 12 / 256),
    ],
)
def test_scales_and_maps_of_small_states_are_no_factors(package: str, name: str, expected: float) -> None:
    optim = pytest.importorskip(f"{package}.optim")
    compiles = package == "torchao"  # only the callback leaves that out of a trace
    module = OneMatrix(torch.optim.AdamW if compiles else getattr(optim, name))
    callbacks = (ReplaceOptimizer(f"torchao.{name}"),) if compiles else ()
    options: Any = StepOptions("32-true")
    profile = profile_module(module, torch.zeros(4, 96), options, callbacks=callbacks, any_micro_batch=False)
    assert traced_run(profile, division("zero_2")).state_bytes == pytest.approx(
        expected, abs=0.1
    )  # maps of up to 1 KiB
