from dataclasses import replace

import numpy as np
import pytest

from lightning_memfit.planner.time import PassWork, pass_seconds, step_seconds
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.step_cost import cpu_seconds, cpu_step_seconds

from .made import NUM_PARAMETERS, RATES, MadeTraceStore, made_workload

CPU = replace(RATES, asynchronous=False, link_bytes_per_s=None, num_cores=2)


def plain():
    return MadeTraceStore(made_workload(1000)).plain()


def made(flops: float = 0.0, num_bytes: float = 0.0, operators: float = 1.0, dtype: str = "float32") -> PassWork:
    """One product of so many FLOPs, one copy of so many bytes, and operators that only have to be issued."""
    return PassWork(
        np.array([f"product {dtype}", "elementwise", "elementwise"]),
        np.array(["forward"] * 3),
        np.array([flops, 0.0, 0.0]),
        np.array([0.0, num_bytes, 0.0]),
        np.array([1.0, 1.0, operators]),
        np.array([0.0, 0.0, operators]),
    )


def test_products_and_traffic_add_up() -> None:
    seconds = pass_seconds(made(2e12, 50e9, 100), RATES)
    assert seconds["arithmetic"] == pytest.approx(0.2)
    assert seconds["memory"] == pytest.approx(0.1)
    assert seconds["launch"] == 0.0  # 100 operators are issued long before


def test_launching_is_a_floor_on_cuda_and_adds_up_on_the_cpu() -> None:
    work = made(1e9, 0.0, 10_000)
    assert sum(pass_seconds(work, RATES).values()) == pytest.approx(0.08)
    assert sum(pass_seconds(work, CPU).values()) == pytest.approx(0.08 + 1e9 / 10e12)


def test_phases_wait_for_the_program_each_by_itself() -> None:
    """Forward is long computed when backward's operators are issued: one can't make up for the other."""
    forward, backward = made(10e12, 0.0, 1000), made(1e9, 0.0, 10_000)
    both = forward + replace(backward, phases=np.array(["backward"] * 3))
    assert sum(pass_seconds(both, RATES).values()) == pytest.approx(1.0 + 0.08)


def test_products_take_what_they_move_besides() -> None:
    work = replace(made(1e12, operators=0.0), num_bytes=np.array([50e9, 0.0, 0.0]))
    assert pass_seconds(work, RATES)["arithmetic"] == pytest.approx(0.1 + 0.1)


@pytest.mark.parametrize(
    ("dtype", "float32_as", "rate"),
    [
        ("float32", "float32", 10e12),
        ("float32", "tf32", 20e12),
        ("bfloat16", "tf32", 40e12),
        ("bfloat16 unaligned", "float32", 8e12),
        ("float32 unaligned", "float32", 10e12),
        ("float32 unaligned", "tf32", 9e12),
    ],
)
def test_rates_of_products_follow_their_dtype_and_alignment(dtype: str, float32_as: str, rate: float) -> None:
    assert pass_seconds(made(1e12, dtype=dtype), RATES, float32_as)["arithmetic"] == pytest.approx(1e12 / rate)


def test_dtypes_without_products_of_their_own_compute_in_float32() -> None:
    assert pass_seconds(made(1e12, dtype="float64"), RATES)["arithmetic"] == pytest.approx(0.1)
    eight = replace(RATES, flops_per_s={**RATES.flops_per_s, "float8": 80e12})
    assert pass_seconds(made(1e12, dtype="float8_e4m3fn"), eight)["arithmetic"] == pytest.approx(1 / 80)


def test_measured_kinds_replace_the_data_sheets() -> None:
    rates = replace(CPU, operators={"product float32": 2e12, "elementwise": 5e9})
    assert pass_seconds(made(1e12, 50e9), rates)["arithmetic"] == pytest.approx(0.5)
    assert pass_seconds(made(1e12, 50e9), rates)["memory"] == pytest.approx(10)
    assert pass_seconds(made(1e12, dtype="bfloat16"), rates)["arithmetic"] == pytest.approx(1e12 / 40e12)


FREE = Cost()
WORK = made(1e12, operators=0.0)


def step(cost: Cost = FREE, rates=RATES, num: int = 4, work: PassWork = WORK):
    return step_seconds(work, cost, plain(), rates, "float32", num)


def test_micro_batches_multiply_and_the_step_does_not() -> None:
    once, four = step(num=1), step(num=4)
    assert four.seconds["arithmetic"] == pytest.approx(4 * once.seconds["arithmetic"])
    assert four.seconds["optimizer"] == once.seconds["optimizer"]


def test_recomputed_operators_weigh_more_than_plain_ones_and_blocks_cost_besides() -> None:
    once, twice = made(1e12, 1e9, 100.0), made(1.5e12, 1.2e9, 150.0)
    more = once.recomputing(twice, each=12.0, blocks=90.0)
    assert more.flops @ more.counts == 0.5e12
    assert more.launches.sum() == 690.0
    added = step(rates=CPU, work=once + more).seconds["launch"] - step(rates=CPU, work=once).seconds["launch"]
    assert added == pytest.approx(4 * 690 * CPU.launch_seconds)


def test_the_trainer_takes_its_time_for_every_batch() -> None:
    slow = replace(CPU, batch_seconds=0.01)
    assert step(rates=slow).total - step(rates=CPU).total == pytest.approx(4 * 0.01)


def test_traffic_over_the_link_hides_behind_computing_only_where_it_overlaps() -> None:
    moving = Cost(Work(host_link_bytes=1e9))  # 50 ms beside 100 ms of products
    assert step(moving).seconds["link"] == pytest.approx(4 * 0.05)
    assert step(replace(moving, overlap=True)).seconds["link"] == 0.0


def test_optimizer_on_the_cpu_takes_its_measured_seconds() -> None:
    seconds = cpu_step_seconds("adamw", plain())
    assert seconds == pytest.approx(cpu_seconds("adamw") * NUM_PARAMETERS, rel=0.01)
    assert step(rates=CPU).seconds["optimizer"] == pytest.approx(seconds / 2)
    assert step(rates=replace(CPU, host_factor=3.0)).seconds["optimizer"] == pytest.approx(3 * seconds / 2)


def test_a_faster_optimizer_on_the_cpu_saves_time_and_steps_one_by_one_cost_some() -> None:
    saved, steps = Cost(step=Work(host_seconds=-0.01)), Cost(step=Work(kernels=1000))
    plain = step(rates=CPU).seconds["optimizer"]
    assert step(saved, rates=CPU).seconds["optimizer"] == pytest.approx(plain - 0.01 / CPU.num_cores)
    assert step(steps, rates=CPU).seconds["optimizer"] == pytest.approx(plain + 1000 * CPU.launch_seconds)


def test_factors_correct_their_component() -> None:
    doubled = replace(RATES, factors={"optimizer": 2.0})
    assert step(rates=doubled).seconds["optimizer"] == pytest.approx(2 * step().seconds["optimizer"])
    assert step(rates=doubled).seconds["arithmetic"] == step().seconds["arithmetic"]


def test_disk_traffic_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="doctor"):
        step(Cost(step=Work(disk_bytes=1.0)))


JOINED = replace(RATES, interconnect_bytes_per_s=10e9, network_bytes_per_s=1e9, disk_bytes_per_s=2e9, num_cores=8)


def exchanging(cost: Cost, rates=JOINED) -> dict[str, float]:
    """A second of products per micro-batch, two of them."""
    return dict(step_seconds(made(10e12, operators=0.0), cost, plain(), rates, "float32", 2).seconds)


def test_gradients_are_exchanged_beside_the_backward_pass() -> None:
    hidden = exchanging(Cost(Work(interconnect_bytes=6e9)))
    assert hidden["interconnect"] == 0
    longer = exchanging(Cost(Work(interconnect_bytes=10e9)))
    assert longer["interconnect"] == pytest.approx(2 * (1 - 2 / 3))
    at_the_end = exchanging(Cost(last_micro_batch=Work(interconnect_bytes=10e9)))
    assert at_the_end["interconnect"] == pytest.approx(1 - 2 / 3)


def test_what_is_exchanged_after_the_step_and_disks_hide_behind_nothing() -> None:
    seconds = exchanging(Cost(Work(disk_bytes=1e9), Work(interconnect_bytes=5e9, disk_bytes=2e9)))
    assert seconds["interconnect"] == pytest.approx(0.5)
    assert seconds["disk"] == pytest.approx(2 * 0.5 + 1.0)


def test_copies_around_an_exchange_take_the_memory_of_the_device() -> None:
    copied = exchanging(Cost(Work(staged_bytes=50e9), last_micro_batch=Work(staged_bytes=50e9)))
    assert copied["memory"] == pytest.approx(0.3)


def test_devices_that_cannot_talk_are_refused() -> None:
    with pytest.raises(ValueError, match="Plan for one device"):
        exchanging(Cost(Work(interconnect_bytes=1.0)), RATES)


def test_devices_share_their_machine_and_machines_the_network() -> None:
    one = JOINED.shared(4)
    assert (one.num_cores, one.disk_bytes_per_s, one.interconnect_bytes_per_s) == (2, 0.5e9, 10e9)
    assert JOINED.shared(4, 2).interconnect_bytes_per_s == 1e9
    assert JOINED.shared(1, 2).interconnect_bytes_per_s == 1e9


def test_a_step_on_the_host_is_bound_by_its_memory_too() -> None:
    work = Work(host_seconds=8.0, host_bytes=80e9)
    slow = replace(JOINED, host_bytes_per_s=20e9)
    faster = exchanging(Cost(step=work))["optimizer"]
    assert exchanging(Cost(step=work), slow)["optimizer"] - faster == pytest.approx(4.0 - 1.0)
