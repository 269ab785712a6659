"""Formulas by hand; `tests/docs/test_offload_host_memory.py` holds them against measured runs."""

import pytest

from lightning_memfit.estimate.zero_moments import ASYNC_IO_BYTES, LIBRARIES_BYTES, ZeroRun, zero_moments
from lightning_memfit.memory import MIB, Category, Tier
from lightning_memfit.nvme.peaks import host_peak_bytes
from lightning_memfit.nvme.sizing import infinity_sizes
from lightning_memfit.profile.record import ParameterInfo

LAYERS = tuple(ParameterInfo(f"h.{i}.weight", MIB, 2, shape=(1024, 1024)) for i in range(16))
N = 16 * MIB


def run_of(**changes: object) -> ZeroRun:
    return ZeroRun(LAYERS, **{"bucket_size": MIB, "on_cpu": True} | changes)


def on_disk(world_size: int = 1, optimizer: bool = True, parameters: bool = True, **changes: object) -> ZeroRun:
    sizes = infinity_sizes([[p.numel for p in LAYERS]], world_size)
    places = {
        "offload_optimizer": "nvme" if optimizer else "none",
        "offload_parameters": "nvme" if parameters else "none",
    }
    return run_of(world_size=world_size, sizes=sizes, **places, **changes)


def kept(run: ZeroRun) -> int:
    moment = zero_moments(run)["kept"]
    return sum(moment.total(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.PINNED_HOST)) - LIBRARIES_BYTES


@pytest.mark.parametrize(
    ("changes", "bytes_per_parameter"),
    [
        ({"stage": 2}, 2 + 12),
        ({"stage": 2, "itemsize": 4}, 4 + 12),  # masters are a copy of their own below stage 3
        ({"stage": 3}, 2 + 2 + 12),
        ({"stage": 3, "itemsize": 4}, 4 + 4 + 8),  # and the weights themselves with it
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
    moment = zero_moments(run)["kept"]
    assert moment.total(Tier.DEVICE) == 2 * MIB
    assert moment.get(Category.PARAMETER, Tier.PINNED_HOST) == 2 * N  # pinned whatever `pin_memory` says
    assert moment.get(Category.GRADIENT, Tier.PINNED_HOST) == 6 * N
    assert moment.get(Category.OPTIMIZER_STATE, Tier.HOST) == 12 * N


def test_first_step_from_disk_makes_the_states_of_a_sub_group_in_memory() -> None:
    run = on_disk()
    moments = zero_moments(run)
    assert run.sizes is not None
    more = moments["update"].total(Tier.HOST) - moments["kept"].total(Tier.HOST)
    assert more == 2 * run.sizes.largest_sub_group * 4
    assert moments["kept"].total(Tier.PINNED_HOST) == run.sizes.optimizer_buffer_bytes + run.sizes.param_buffer_bytes


def test_a_gradient_that_fills_no_aligned_piece_stays_whole_until_its_step() -> None:
    odd = (*LAYERS, ParameterInfo("odd", MIB + 8, 2, shape=(MIB + 8,)))
    sizes = infinity_sizes([[p.numel for p in odd]])
    plain, with_odd = on_disk(), ZeroRun(odd, sizes=sizes, offload_optimizer="nvme", offload_parameters="nvme")
    held = [
        zero_moments(run)["update"].get(Category.GRADIENT, Tier.HOST)
        - zero_moments(run)["kept"].get(Category.GRADIENT, Tier.HOST)
        for run in (plain, with_odd)
    ]
    assert held == [0, 4 * (MIB + 8)]


def test_parameters_alone_on_disk_leave_the_optimizer_on_the_device() -> None:
    moments = zero_moments(on_disk(optimizer=False, on_cpu=False))
    assert moments["kept"].get(Category.OPTIMIZER_STATE) == 12 * N
    assert moments["kept"].total(Tier.HOST) == LIBRARIES_BYTES + ASYNC_IO_BYTES


def test_activations_come_on_top_of_passes_on_the_device() -> None:
    plain, more = (run_of(stage=3, on_cpu=False, activation_bytes=size) for size in (0, 99 * MIB))
    assert zero_moments(more)["passes"].total() - zero_moments(plain)["passes"].total() == pytest.approx(
        99 * MIB, abs=3 * MIB
    )
    assert host_peak_bytes(zero_moments(more), on_cpu=False) == host_peak_bytes(zero_moments(plain), on_cpu=False)


def test_fp64_norm_of_an_offloaded_gradient() -> None:
    """Where gradients step on the host, their norm is taken first, at eight bytes an element."""
    large = (ParameterInfo("wte", 8 * MIB, 2, shape=(8 * MIB,)), *LAYERS)
    run = ZeroRun(large, stage=3, offload_optimizer="cpu", offload_parameters="cpu", on_cpu=True)
    moments = zero_moments(run)
    assert moments["passes"].total() - moments["kept"].total() == 8 * 8 * MIB


def test_refused() -> None:
    with pytest.raises(ValueError, match="holds none that is trained"):
        ZeroRun(())
    with pytest.raises(ValueError, match="pass those of `infinity_sizes`"):
        run_of(offload_optimizer="nvme")
