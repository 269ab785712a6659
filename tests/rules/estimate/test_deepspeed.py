"""Formulas by hand, and DeepSpeed's own buffers one by one; `test_offload_host_memory.py` holds peaks."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.offload_host_memory.buffers import KINDS, RESULTS, SIZE
from benchmarks.offload_host_memory.cases import config_of
from benchmarks.offload_host_memory.predict import parameters_of
from lightning_memfit.estimate.deepspeed import (
    ASYNC_IO_BYTES,
    LIBRARIES_BYTES,
    PERSISTENT_NUMEL,
    DeepSpeedMemory,
    DeepSpeedRun,
    deepspeed_memory,
)
from lightning_memfit.estimate.deepspeed_sizes import AioSettings, InfinitySizes, infinity_sizes
from lightning_memfit.estimate.division import Division
from lightning_memfit.memory import GIB, MIB, Category, MemoryBreakdown, Tier
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.parameters import ParameterInfo

LAYERS = tuple(ParameterInfo(f"h.{i}.weight", MIB, 2, shape=(1024, 1024)) for i in range(16))
N = 16 * MIB


def run_of(**changes: object) -> DeepSpeedRun:
    return DeepSpeedRun(LAYERS, **{"bucket_size": MIB, "on_cpu": True} | changes)


def on_disk(world_size: int = 1, optimizer: bool = True, parameters: bool = True, **changes: object) -> DeepSpeedRun:
    sizes = infinity_sizes([[p.numel for p in LAYERS]], world_size)
    places = {
        "offload_optimizer": "nvme" if optimizer else "none",
        "offload_parameters": "nvme" if parameters else "none",
    }
    return run_of(world_size=world_size, sizes=sizes, **places, **changes)


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


def test_ranks_divide_states_but_below_stage_3_not_weights() -> None:
    assert kept(run_of(stage=2, world_size=4)) == 2 * N + 12 * N // 4
    assert kept(run_of(stage=3, world_size=4)) == 16 * N // 4 + 2 * MIB


def test_offloading_from_a_gpu_takes_host_memory_and_frees_the_devices() -> None:
    run = run_of(stage=3, on_cpu=False, offload_optimizer="cpu", offload_parameters="cpu", pin_memory=True)
    moment = deepspeed_memory(run).kept
    assert moment.total(Tier.DEVICE) == 2 * MIB
    assert moment.get(Category.PARAMETER, Tier.PINNED_HOST) == 4 * N  # what is in use, and what `zero.Init` locked
    pageable = deepspeed_memory(replace(run, pin_memory=False)).kept
    assert pageable.by_category(Tier.PINNED_HOST) == {Category.PARAMETER: 2 * N}  # whatever `pin_memory` says
    assert moment.get(Category.GRADIENT, Tier.PINNED_HOST) == 6 * N
    assert moment.get(Category.OPTIMIZER_STATE, Tier.HOST) == 12 * N


def test_first_step_from_disk_makes_the_states_of_a_sub_group_in_memory() -> None:
    run = on_disk()
    moments = deepspeed_memory(run).moments
    assert run.sizes is not None
    more = moments["update"].total(Tier.HOST) - moments["kept"].total(Tier.HOST)
    assert more == 2 * run.sizes.largest_sub_group * 4
    assert moments["kept"].total(Tier.PINNED_HOST) == run.sizes.optimizer_buffer_bytes + run.sizes.param_buffer_bytes


def test_a_gradient_that_fills_no_aligned_piece_stays_whole_until_its_step() -> None:
    odd = (*LAYERS, ParameterInfo("odd", MIB + 8, 2, shape=(MIB + 8,)))
    sizes = infinity_sizes([[p.numel for p in odd]])
    plain, with_odd = on_disk(), DeepSpeedRun(odd, sizes=sizes, offload_optimizer="nvme", offload_parameters="nvme")
    held = [held_until_step(run) for run in (plain, with_odd)]
    assert held[1] - held[0] == 4 * (MIB + 8)


def held_until_step(run: DeepSpeedRun) -> int:
    """Bytes of gradients in memory before the step and not after it, on the device, which makes them."""
    moments = deepspeed_memory(run).moments
    return moments["update"].get(Category.GRADIENT) - moments["kept"].get(Category.GRADIENT)


SMALL = (ParameterInfo("bias", 2048, 2, shape=(2048,)), ParameterInfo("ln", 1024, 2, shape=(1024,)))


def with_small(world_size: int = 1, **changes: object) -> DeepSpeedRun:
    parameters = (*LAYERS, *SMALL)
    sizes = infinity_sizes([[p.numel for p in parameters]], world_size)
    places = {"offload_optimizer": "nvme", "offload_parameters": "nvme"}
    return DeepSpeedRun(parameters, world_size=world_size, sizes=sizes, **(places | changes))


def test_gradients_too_small_for_disk_are_copies_from_backward_to_step() -> None:
    for run in (with_small(), with_small(on_cpu=True), with_small(itemsize=4)):
        assert held_until_step(run) == 4 * 3072
    in_fp32 = with_small(on_cpu=True, itemsize=4)  # views of the buffer for all gradients
    assert held_until_step(in_fp32) == 0
    assert deepspeed_memory(in_fp32).kept.get(Category.GRADIENT, Tier.HOST) == 4 * in_fp32.share


def test_small_weights_stay_whole_on_every_rank_beside_those_on_disk() -> None:
    kept = [deepspeed_memory(with_small(ranks)).kept.get(Category.PARAMETER) for ranks in (1, 2)]
    assert kept == [2 * 3072, 2 * (3072 // 2 + 3072)]


def test_parameters_alone_on_disk_leave_the_optimizer_on_the_device() -> None:
    moments = deepspeed_memory(on_disk(optimizer=False, on_cpu=False)).moments
    assert moments["kept"].get(Category.OPTIMIZER_STATE) == 12 * N
    assert moments["kept"].total(Tier.HOST) == LIBRARIES_BYTES + ASYNC_IO_BYTES


def test_activations_come_on_top_of_passes_on_the_device() -> None:
    plain, more = (run_of(stage=3, on_cpu=False, activation_bytes=size) for size in (0, 99 * MIB))
    assert deepspeed_memory(more).moments["passes"].total() - deepspeed_memory(plain).moments[
        "passes"
    ].total() == pytest.approx(99 * MIB, abs=3 * MIB)
    assert deepspeed_memory(more).host_peak_bytes == deepspeed_memory(plain).host_peak_bytes


def test_fp64_norm_of_an_offloaded_gradient() -> None:
    """Where gradients step on the host, their norm is taken first, at eight bytes an element."""
    large = (ParameterInfo("wte", 8 * MIB, 2, shape=(8 * MIB,)), *LAYERS)
    run = DeepSpeedRun(large, stage=3, offload_optimizer="cpu", offload_parameters="cpu", on_cpu=True)
    moments = deepspeed_memory(run).moments
    assert moments["passes"].total() - moments["kept"].total() == 8 * 8 * MIB


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


def test_either_alone() -> None:
    parameters = gpt2_xl()
    sizes = sizes_of(parameters)
    optimizer = states_of(parameters, sizes, offload_parameters=False)
    weights = states_of(parameters, sizes, offload_optimizer=False)
    assert optimizer.get(Category.PARAMETER, Tier.DISK) == 0
    assert optimizer.get(Category.PARAMETER, Tier.DEVICE) > 3e9
    assert weights.by_category(Tier.DISK).keys() == {Category.PARAMETER}
    assert weights.get(Category.OPTIMIZER_STATE, Tier.DEVICE) > 18e9  # nobody asked to take it off the device
    assert weights.get(Category.GRADIENT, Tier.HOST) == 0
    assert optimizer.total(Tier.PINNED_HOST) == sizes.optimizer_buffer_bytes
    assert weights.total(Tier.PINNED_HOST) == sizes.param_buffer_bytes


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


# --- the largest moment -----------------------------------------------------------------------------------------------

PINNED = MemoryBreakdown.on(Tier.PINNED_HOST, {Category.COMMUNICATION: 3 * GIB})
MOMENTS = {
    "passes": PINNED + MemoryBreakdown.device({Category.TEMPORARY: 5 * GIB}),
    "update": PINNED + MemoryBreakdown.on(Tier.HOST, {Category.GRADIENT: GIB}),
}


def test_the_cpus_device_memory_is_host_memory() -> None:
    on_cpu, on_gpu = (DeepSpeedMemory(MOMENTS, PINNED, on_cpu) for on_cpu in (True, False))
    assert on_cpu.host_peak == ("passes", MOMENTS["passes"])
    assert on_cpu.host_peak_bytes == 8 * GIB
    assert on_gpu.host_peak[0] == "update"
    assert on_gpu.host_peak_bytes == 4 * GIB
    assert on_gpu.device_peak_bytes == 5 * GIB


def test_a_built_model_is_not_built_again() -> None:
    memory = DeepSpeedMemory({"build": PINNED, **MOMENTS}, PINNED)
    assert memory.once_built().moments == MOMENTS


# --- against DeepSpeed's own buffers ----------------------------------------------------------------------------------

BUFFERS = json.loads(Path(RESULTS).read_text())["rows"]


def measured_run(row: dict[str, Any], on_cpu: bool = False) -> DeepSpeedRun:
    arguments = KINDS[row["kind"]]
    places: list[Any] = ["cpu" if arguments.get(f"offload_{what}") else "none" for what in ("optimizer", "parameters")]
    pinned = arguments.get("pin_memory", False)
    divided = Division(row["kind"], arguments["stage"], row["ranks"], 1, True, *places, pin_memory=pinned)
    itemsize = 2 if row["precision"].startswith("bf16") else 4
    parameters = parameters_of(tuple(config_of(SIZE).items()))
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


def test_torch_locks_powers_of_two() -> None:
    """`CachingHostAllocator` rounds every block up; DeepSpeed's own buffers for disk are exact."""
    table = (ParameterInfo("w", 3 * MIB, 2, shape=(3, MIB)),)
    run = DeepSpeedRun(table, 3, offload_optimizer="cpu", offload_parameters="cpu", bucket_size=MIB)
    pinned = deepspeed_memory(run).kept.by_category(Tier.PINNED_HOST)
    assert pinned == {Category.PARAMETER: 6 * MIB, Category.FRAGMENTATION: 2 * MIB}


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


def test_parameters_that_stay_whole_are_never_gathered() -> None:
    small = tuple(ParameterInfo(f"{at}", PERSISTENT_NUMEL, 4, shape=(PERSISTENT_NUMEL,)) for at in range(3))
    large = ParameterInfo("large", PERSISTENT_NUMEL + 1, 4, shape=(PERSISTENT_NUMEL + 1,))
    assert gathered(DeepSpeedRun(small, 3, 2, 4)) == 0
    assert gathered(DeepSpeedRun((*small, large), 3, 2, 4)) == 4 * large.numel


def gathered(run: DeepSpeedRun) -> int:
    memory = deepspeed_memory(run)
    return memory.around_passes.get(Category.COMMUNICATION) - memory.kept.get(Category.COMMUNICATION)


def test_offloaded_gradients_of_several_micro_batches_are_those_of_whole_parameters() -> None:
    """Stage 1 keeps them on the device, where it accumulates them."""
    parts = tuple(ParameterInfo(f"{at}", 100, 4, shape=(100,)) for at in range(3))
    runs = [
        DeepSpeedRun(parts, stage, 2, 4, offload_optimizer="cpu", accumulates=accumulates)
        for stage in (1, 2)
        for accumulates in (False, True)
    ]
    gradients = [deepspeed_memory(run).kept.get(Category.GRADIENT, Tier.HOST) for run in runs]
    assert gradients == [600, 600, 600, 600 + 800]
    on_device = [deepspeed_memory(run).around_passes.get(Category.GRADIENT, Tier.DEVICE) for run in runs[:2]]
    assert on_device == [0, 1200]


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_stage_3_looks_for_overflows_of_fp16_in_all_gradients_at_once(offload: str) -> None:
    plain, checked = (
        deepspeed_memory(run_of(stage=3, world_size=2, offload_optimizer=offload, is_fp16=is_fp16, scratch_bytes=0))
        for is_fp16 in (False, True)
    )
    tier = Tier.DEVICE if offload == "none" else Tier.HOST
    share = 3 * run_of(stage=3, world_size=2).share
    more = [memory.moments["update"].total(tier) - memory.kept.total(tier) for memory in (plain, checked)]
    assert more[1] == (more[0] + share if offload == "cpu" else max(more[0], share))
    assert more[1] >= share
    below = (run_of(stage=2, offload_optimizer=offload, is_fp16=is_fp16) for is_fp16 in (False, True))
    first, second = (deepspeed_memory(run).moments["update"] for run in below)
    assert first == second
