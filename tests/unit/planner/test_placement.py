import json
from pathlib import Path

import pytest
import torch

from lightning_memfit.memory import Category, Tier
from lightning_memfit.models.architecture import build, resolve_config
from lightning_memfit.planner.placement import NCCL_BYTES, Shape, deepspeed_placement, torch_placement
from lightning_memfit.planner.steady_state import SteadyState
from lightning_memfit.profile.record import ParameterInfo
from lightning_memfit.profile.step import parameter_table
from lightning_memfit.techniques.core.registry import find_technique
from lightning_memfit.techniques.core.sharding import Sharding

MEASURED = json.loads((Path(__file__).parents[3] / "benchmarks/results/strategies_cpu.json").read_text())
GIB = 1 << 30


def sharding(name: str) -> Sharding:
    found = find_technique(name).sharding
    assert found is not None
    return found


@pytest.fixture(scope="module")
def shape() -> Shape:
    with torch.device("meta"):
        table = parameter_table(build(resolve_config(None, None, MEASURED["config"]), None, "sdpa"))
    return Shape(table, 8)


def simple(numel: int = 1 << 30) -> Shape:
    return Shape((ParameterInfo("layer.weight", numel, 4),), 8)


@pytest.mark.parametrize("name", [name for name in MEASURED["rows"] if name not in ("ddp", "fsdp2")])
def test_bytes_of_a_rank_are_those_measured(name: str, shape: Shape) -> None:
    placed = deepspeed_placement(shape, sharding(name), MEASURED["ranks"], MEASURED["precision"], cuda=False)
    standing, measured = placed.standing, MEASURED["rows"][name]
    assert shape.total == MEASURED["parameters"]
    # It was measured between two steps, when buckets are gone, and gradients of ZeRO-1 and 2.
    gone = standing.communication_bytes + (standing.gradient_bytes if name in ("zero_1", "zero_2") else 0)
    assert standing.kept_bytes - gone <= 1.01 * measured["live_bytes"]
    assert standing.kept_bytes >= 0.95 * measured["live_bytes"]
    on_disk = MEASURED["ranks"] * placed.elsewhere.total(Tier.DISK)
    assert on_disk == pytest.approx(measured["disk_bytes"], rel=0.01)


def test_stages_divide_more_and_more() -> None:
    kept = [deepspeed_placement(simple(), sharding(f"zero_{s}"), 4, "bf16-mixed").standing for s in (1, 2, 3)]
    assert [s.parameter_bytes // GIB for s in kept] == [2, 2, 0]
    assert [s.gradient_bytes * 2 // GIB for s in kept] == [4, 1, 1]
    assert {s.state_bytes // GIB for s in kept} == {3}  # 12 bytes per parameter among four
    assert all(s.communication_bytes > NCCL_BYTES for s in kept)


def test_full_precision_keeps_master_weights_too() -> None:
    standing = deepspeed_placement(simple(), sharding("zero_2"), 1, "32-true").standing
    assert (standing.parameter_bytes // GIB, standing.state_bytes // GIB) == (4, 12)
    assert standing.step_bytes - standing.kept_bytes == 8 * GIB  # gradients flattened, and a copy by the optimizer


def test_offloading_leaves_the_device() -> None:
    on_host = deepspeed_placement(simple(), sharding("zero_offload"), 2, "bf16-mixed")
    assert on_host.standing.state_bytes == on_host.standing.gradient_bytes == 0
    assert on_host.standing.step_bytes == on_host.standing.kept_bytes
    assert on_host.elsewhere.get(Category.OPTIMIZER_STATE, Tier.HOST) == 4 * GIB
    assert on_host.elsewhere.total(Tier.PINNED_HOST) == 6 * GIB  # masters, fp32 gradients, twice half precision
    weights_too = deepspeed_placement(simple(), sharding("zero_3_offload"), 2, "bf16-mixed")
    assert weights_too.standing.parameter_bytes == 0
    assert weights_too.elsewhere.get(Category.PARAMETER, Tier.PINNED_HOST) == GIB


def test_from_disk_host_memory_holds_little() -> None:
    table = tuple(ParameterInfo(f"h.{i}.weight", 1 << 24, 4) for i in range(64))
    placed = deepspeed_placement(Shape(table, 8), sharding("zero_infinity"), 1, "bf16-mixed")
    assert placed.elsewhere.total(Tier.DISK) >= 18 * GIB
    assert placed.elsewhere.total(Tier.HOST) + placed.elsewhere.total(Tier.PINNED_HOST) < 4 * GIB
    assert placed.standing.kept_bytes < GIB
    in_memory = deepspeed_placement(Shape(table, 8), sharding("zero_infinity"), 1, "bf16-mixed", cuda=False)
    assert in_memory.standing.kept_bytes > placed.standing.kept_bytes + 2 * GIB
    assert {tier for tier, _ in in_memory.elsewhere.entries} == {Tier.DISK}


def test_torch_strategies_divide_what_a_trace_shows() -> None:
    whole = SteadyState(1600, 1700, 2000, 800, 400, 0, 400)
    table = (ParameterInfo("h.0.weight", 100, 4),)
    ddp = torch_placement(whole, sharding("ddp"), 2, table, cuda=False).standing
    assert ddp.kept_bytes == 2000  # gradients once more
    shard = torch_placement(whole, sharding("fsdp2"), 2, table, cuda=False).standing
    assert shard.kept_bytes == 800 + 3 * 400  # half of everything, and three times a block
    assert shard.step_bytes == shard.kept_bytes + 200
    assert (shard.parameter_bytes, shard.state_bytes, shard.communication_bytes) == (200, 400, 1200)
