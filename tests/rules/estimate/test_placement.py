from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.runner import read
from lightning_memfit.device.health import Finding
from lightning_memfit.estimate.deepspeed import DeepSpeedMemory, DeepSpeedRun, deepspeed_memory
from lightning_memfit.estimate.deepspeed_sizes import zero_sizes
from lightning_memfit.estimate.placement import deepspeed_placement, gathered_bytes, torch_placement
from lightning_memfit.estimate.steady_state import SteadyState
from lightning_memfit.memory import Tier
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.models.architecture import build, resolve_config
from lightning_memfit.strategies import host_check
from lightning_memfit.strategies.zero_config import ZeroOptions
from lightning_memfit.strategies.zero_infinity import ZeroInfinityStrategy
from lightning_memfit.techniques.core.registry import find_technique
from lightning_memfit.techniques.core.sharding import Sharding

MEASURED = read("strategies_cpu.json")
ROWS = {row["strategy"]: row for row in MEASURED["rows"]}


def sharding(name: str) -> Sharding:
    found = find_technique(name).sharding
    assert found is not None
    return found


@cache
def measured_model() -> tuple[ParameterInfo, ...]:
    with torch.device("meta"):
        return parameter_table(build(resolve_config(None, None, MEASURED["config"]), None, "sdpa"))


@cache
def gpt2_xl() -> tuple[ParameterInfo, ...]:
    config = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "bos_token_id": 0, "eos_token_id": 0}
    with torch.device("meta"):
        return parameter_table(build(resolve_config(None, None, config), None, "sdpa"))


def simple(layers: int = 64) -> tuple[ParameterInfo, ...]:
    """2^30 elements."""
    return tuple(ParameterInfo(f"h.{i}.weight", (1 << 30) // layers, 4) for i in range(layers))


def run_of(
    parameters: tuple[ParameterInfo, ...], name: str, ranks: int, precision: str, cuda: bool = True, **options: Any
) -> DeepSpeedRun:
    """As `MemoryModels.deepspeed_run` describes a technique."""
    found = sharding(name)
    division = found.division(name, ranks, ranks, found.offloads)
    return division.run_of(parameters, found.weight_bytes(precision), on_cpu=not cuda, **options)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("ddp", "fsdp2")])
def test_bytes_of_a_rank_are_those_measured(name: str) -> None:
    run = run_of(measured_model(), name, MEASURED["ranks"], MEASURED["precision"], cuda=False)
    placed = deepspeed_placement(run)
    standing, measured = placed.standing, ROWS[name]
    assert run.whole == MEASURED["parameters"]
    # It was measured between two steps, when buckets are gone, and gradients of ZeRO-1 and 2.
    gone = standing.communication_bytes + (standing.gradient_bytes if name in ("zero_1", "zero_2") else 0)
    assert standing.kept_bytes - gone <= 1.05 * measured["live_bytes"]
    assert standing.kept_bytes >= 0.95 * measured["live_bytes"]
    on_disk = MEASURED["ranks"] * placed.elsewhere.total(Tier.DISK)
    assert on_disk == pytest.approx(measured["disk_bytes"], rel=0.05)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["zero_offload", "zero_3_offload_optimizer", "zero_3_offload"])
def test_a_plan_and_the_check_before_a_run_ask_for_the_same(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `require_host_memory` compares with the machine, from the configuration that the plan's overlay makes."""
    placed = deepspeed_placement(run_of(gpt2_xl(), name, ranks, "bf16-mixed", accumulates=True))
    asked: list[DeepSpeedMemory] = []

    def host_memory(memory: DeepSpeedMemory, *arguments: Any) -> Finding:
        asked.append(memory)
        return Finding("host memory", "ok", "")

    monkeypatch.setattr(host_check, "host_memory", host_memory)
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25))
    found = sharding(name)
    options = ZeroOptions(found.stage, True, found.parameters != "none", pin_memory=True)
    zero = zero_sizes(options.config({})["zero_optimization"], [one.numel() for one in model.parameters()], ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    host_check.require_host_memory(model, optimizer, zero, "bf16-mixed", ranks, ranks, on_cpu=False, accumulates=True)
    (memory,) = asked
    _, peak = memory.host_peak
    for tier in (Tier.PINNED_HOST, Tier.HOST):
        assert placed.elsewhere.by_category(tier) == peak.by_category(tier)
    assert placed.standing.step_bytes == memory.device_peak_bytes
    assert placed.standing.kept_bytes == memory.around_passes.total()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_and_the_preflight_ask_for_the_same(ranks: int, tmp_path: Path) -> None:
    run = run_of(gpt2_xl(), "zero_infinity", ranks, "bf16-mixed")
    strategy = ZeroInfinityStrategy(str(tmp_path))
    strategy.precision_plugin = DeepSpeedPrecision("bf16-mixed")
    strategy.set_world_ranks = lambda: None  # type: ignore[method-assign]
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.set_world_size(ranks)
    described = strategy._described(gpt2_xl(), strategy._sizes(gpt2_xl()), accumulates=False)
    placed, memory = deepspeed_placement(run), deepspeed_memory(replace(described, on_cpu=False))
    assert described.sizes == run.sizes
    _, peak = memory.host_peak
    for tier in (Tier.PINNED_HOST, Tier.HOST, Tier.DISK):
        assert placed.elsewhere.by_category(tier) == peak.by_category(tier)
    assert placed.standing.step_bytes == memory.device_peak_bytes


def test_torch_strategies_divide_what_a_trace_shows() -> None:
    whole = SteadyState(1600, 1700, 2000, 800, 400, 0, 400)
    table = (ParameterInfo("h.0.weight", 100, 4),)
    ddp = torch_placement(whole, 0, 2, table, cuda=False).standing
    assert (ddp.kept_bytes, ddp.step_bytes) == (1600, 2000)  # gradients once more, while buckets are made anew
    copied = torch_placement(whole, 0, 2, table, cuda=False, copies_gradients=True).standing
    assert (copied.kept_bytes, copied.step_bytes) == (2000, 2400)  # at every moment
    shard = torch_placement(whole, 3, 2, table, cuda=False).standing
    assert shard.kept_bytes == 800 + 3 * 400  # half of everything, and three times a block
    assert shard.step_bytes == shard.kept_bytes + 200
    assert (shard.parameter_bytes, shard.state_bytes, shard.communication_bytes) == (200, 400, 1200)


def test_blocks_are_gathered_as_one():
    parameters = (
        ParameterInfo("h.0.a.weight", 10, 4),
        ParameterInfo("h.0.b.weight", 20, 4),
        ParameterInfo("h.1.a.weight", 10, 4),
        ParameterInfo("wte", 25, 4),
        ParameterInfo("head", 100, 4, shared_with="wte"),
    )
    assert gathered_bytes(parameters) == 3 * 120 + 100
