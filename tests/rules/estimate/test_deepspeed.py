"""Formulas by hand, and DeepSpeed's own buffers one by one; `test_records.py` holds peaks."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.host_memory.buffers import KINDS, RESULT, SIZE
from benchmarks.host_memory.peaks import parameters_of
from benchmarks.runner import read
from lightning_memfit.estimate.deepspeed import (
    LIBRARIES_BYTES,
    DeepSpeedRun,
    deepspeed_memory,
)
from lightning_memfit.estimate.deepspeed_sizes import AioSettings, InfinitySizes, infinity_sizes
from lightning_memfit.estimate.division import Division
from lightning_memfit.memory import MIB, Category, MemoryBreakdown, Tier
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.parameters import ParameterInfo

LAYERS = tuple(ParameterInfo(f"h.{i}.weight", MIB, 2, shape=(1024, 1024)) for i in range(16))
N = 16 * MIB


def run_of(**changes: object) -> DeepSpeedRun:
    return DeepSpeedRun(LAYERS, **{"bucket_size": MIB, "on_cpu": True} | changes)


def kept(run: DeepSpeedRun) -> int:
    moment = deepspeed_memory(run).kept
    return sum(moment.total(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.PINNED_HOST)) - LIBRARIES_BYTES


@pytest.mark.parametrize(
    ("changes", "bytes_per_parameter"),
    [
        ({"stage": 2}, 2 + 12),
        ({"stage": 2, "itemsize": 4}, 4 + 12),  # masters are a copy of their own below stage 3
        ({"stage": 3}, 2 + 2 + 12),
        ({"stage": 3, "itemsize": 4}, 4 + 4 + 12),  # as well as with it: a device is compared with its name
        ({"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}, 2 + 2 + 4 + 12),
    ],
)
def test_bytes_that_stay(changes: dict, bytes_per_parameter: int) -> None:
    buckets = changes.get("itemsize", 2) * MIB * (changes["stage"] == 3)
    assert kept(run_of(**changes)) == N * bytes_per_parameter + buckets


def test_refused() -> None:
    with pytest.raises(ValueError, match="holds none that is trained"):
        DeepSpeedRun(())
    with pytest.raises(ValueError, match="pass those of `infinity_sizes`"):
        run_of(offload_optimizer="nvme")


# --- states on disk ---------------------------------------------------------------------------------------------------


def states_of(
    parameters: tuple[ParameterInfo, ...],
    sizes: InfinitySizes,
    world_size: int = 1,
    offload_optimizer: bool = True,
    offload_parameters: bool = True,
) -> MemoryBreakdown:
    """What stays, and one gathered weight with its gradient."""
    run = DeepSpeedRun(
        parameters,
        3,
        world_size,
        sizes.itemsize,
        offload_optimizer="nvme" if offload_optimizer else "none",
        offload_parameters="nvme" if offload_parameters else "none",
        sizes=sizes,
        on_cpu=True,
    )
    gradient = MemoryBreakdown.device({Category.GRADIENT: run.largest * run.itemsize * offload_parameters})
    return deepspeed_memory(run).around_passes + gradient


@cache
def gpt2_xl() -> tuple[ParameterInfo, ...]:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return parameter_table(GPT2LMHeadModel(GPT2Config(n_layer=48, n_embd=1600, n_head=25)).bfloat16())


def sizes_of(parameters: tuple[ParameterInfo, ...], world_size: int = 1, itemsize: int = 2) -> InfinitySizes:
    distinct = [parameter for parameter in parameters if not parameter.shared_with]
    groups = [[p.numel for p in distinct if p.dims > 1], [p.numel for p in distinct if p.dims == 1]]
    return infinity_sizes(groups, world_size, itemsize)


@pytest.mark.parametrize(("itemsize", "per_parameter"), [(2, 18), (4, 20)])
def test_disk_takes_eighteen_bytes_per_parameter_in_bf16_and_twenty_in_fp32(itemsize: int, per_parameter: int) -> None:
    parameters = gpt2_xl()
    total = sum(p.numel for p in parameters if not p.shared_with)
    untied = tuple(p for p in parameters if not p.shared_with)
    states = states_of(untied, sizes_of(parameters, itemsize=itemsize))
    assert states.total(Tier.DISK) / total == pytest.approx(per_parameter, rel=2e-3)


@pytest.mark.parametrize("world_size", [1, 4])
def test_agrees_with_the_papers_bytes_where_they_say_something(world_size: int) -> None:
    parameters = gpt2_xl()
    total = sum(p.numel for p in parameters if not p.shared_with)
    untied = tuple(p for p in parameters if not p.shared_with)
    ours = states_of(untied, sizes_of(parameters, world_size), world_size)
    persistent = sum(p.numel for p in untied if p.numel <= 100_000) if world_size > 1 else 0  # whole on every rank
    paper = {Category.PARAMETER: 2 * total // world_size, Category.OPTIMIZER_STATE: 12 * total // world_size}
    for category, expected in paper.items():  # Rajbhandari et al. 2020, section 3
        everywhere = sum(ours.get(category, tier) for tier in Tier)
        everywhere -= 2 * persistent * (category is Category.PARAMETER)  # which the paper doesn't mention
        assert everywhere == pytest.approx(expected, rel=1e-3)
        assert ours.get(category, Tier.DISK) > 0.99 * everywhere


def test_what_is_too_small_stays_in_memory() -> None:
    table = (ParameterInfo("w", 2**18, 2, shape=(2**9, 2**9)), ParameterInfo("b", 8, 2, shape=(8,)))
    sizes = infinity_sizes([[2**18], [8]], itemsize=2)
    states = states_of(table, sizes)
    assert states.by_category(Tier.DISK) == {
        Category.OPTIMIZER_STATE: 3 * 2**20,  # exactly 1 MiB each in fp32
        Category.GRADIENT: 2**20,
    }
    assert states.get(Category.PARAMETER, Tier.HOST) == 2**19  # half a MiB in bf16
    assert states.get(Category.PARAMETER, Tier.DEVICE) == 16
    larger_blocks = infinity_sizes([[2**18], [8]], itemsize=2, aio=AioSettings(block_size=2**21))
    assert states_of(table, larger_blocks).total(Tier.DISK) == 0


def test_frozen_weights_have_no_states_and_of_tied_ones_only_a_file_stays() -> None:
    table = (
        ParameterInfo("frozen", 2**20, 2, trainable=False, shape=(2**20,)),
        ParameterInfo("trained", 2**20, 2, shape=(2**20,)),
        ParameterInfo("tied", 2**20, 2, shared_with="trained", shape=(2**20,)),
    )
    states = states_of(table, infinity_sizes([[2**20]], itemsize=2))
    assert states.get(Category.PARAMETER, Tier.DISK) == 3 * 2 * 2**20
    assert states.get(Category.OPTIMIZER_STATE, Tier.DISK) == 3 * 4 * 2**20
    assert states.get(Category.GRADIENT, Tier.DISK) == 4 * 2**20


# --- against DeepSpeed's own buffers ----------------------------------------------------------------------------------

BUFFERS = read(RESULT)["rows"]


def measured_run(row: dict[str, Any], on_cpu: bool = False) -> DeepSpeedRun:
    arguments = KINDS[row["kind"]]
    places: list[Any] = ["cpu" if arguments.get(f"offload_{what}") else "none" for what in ("optimizer", "parameters")]
    pinned = arguments.get("pin_memory", False)
    divided = Division(row["kind"], arguments["stage"], row["ranks"], 1, True, *places, pin_memory=pinned)
    itemsize = 2 if row["precision"].startswith("bf16") else 4
    parameters = parameters_of(SIZE)
    return divided.run_of(parameters, itemsize, accumulates=row["accumulate"] > 1, on_cpu=on_cpu)


@pytest.mark.parametrize("row", BUFFERS, ids=lambda row: f"{row['kind']}-{row['ranks']}-{row['accumulate']}")
def test_buffers_that_stay_are_those_measured(row: dict[str, Any]) -> None:
    """All memory together, page-locked memory apart. DeepSpeed locks blocks of whole pages."""
    run = measured_run(row)
    kept = deepspeed_memory(run).kept
    locked = kept.total(Tier.PINNED_HOST) - kept.get(Category.FRAGMENTATION, Tier.PINNED_HOST)
    assert row["locked_bytes"] == pytest.approx(locked, rel=0.05)
    measured = sum(entry["bytes"] for entry in row["after_step"].values())
    nccl = 0 if run.world_size == 1 else 512 * MIB
    in_all = locked + kept.total(Tier.HOST) - LIBRARIES_BYTES + kept.total(Tier.DEVICE) - nccl
    assert measured == pytest.approx(in_all, rel=0.05)


@pytest.mark.parametrize("row", [row for row in BUFFERS if "offload" not in row["kind"]], ids=lambda row: row["kind"])
def test_gradients_before_the_step_are_those_measured(row: dict[str, Any]) -> None:
    """The first rank's. In stages 1 and 2 they are those of whole parameters, and the last rank has most of them."""
    run = measured_run(row)
    measured = row["after_backward"]["averaged_gradients"]["bytes"]
    most = deepspeed_memory(run).around_passes.get(Category.GRADIENT)
    if run.stage == 3:
        assert measured == most
        return
    assert run.share * run.itemsize <= 1.001 * measured <= 1.002 * run.owned * run.itemsize  # views of whole ones
    assert most == (sum(run.trained) if row["kind"] == "zero_1" else run.owned) * run.itemsize


# --- copies while a bucket is reduced ---------------------------------------------------------------------------------


def test_a_bucket_of_several_ranks_is_copied_as_a_whole_and_one_of_a_single_rank_not_at_all() -> None:
    """Of a model of 1,200 bytes: its one bucket, then a bucket on each side of the cut, then one across it."""
    assert run_across(300, 2).copied(0, 1200) == 1200
    assert run_across(300, 1).copied(0, 1200) == 0
    assert run_across(300, 2).copied(0, 600) == 0
    assert run_across(300, 2).copied(600, 1200) == 0
    assert run_across(300, 2).copied(400, 1000) == 600
    assert run_across(300, 3).copied(400, 800) == 0
    assert run_across(300, 3).copied(396, 800) == 404


def run_across(numel: int, world_size: int) -> DeepSpeedRun:
    return DeepSpeedRun((ParameterInfo("w", numel, 4, shape=(numel,)),), 2, world_size, 4)


def test_stage_3_copies_a_bucket_and_so_does_gloo() -> None:
    run = replace(run_across(300, 2), stage=3)
    assert [one.copied(0, 1200) for one in (run, replace(run, on_cpu=True))] == [1200, 2400]
    assert replace(run, on_cpu=True, world_size=1).copied(0, 1200) == 0
