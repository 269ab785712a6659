from dataclasses import replace

import pytest

from lightning_memfit.planner.time import PassWork, pass_seconds, step_seconds
from lightning_memfit.techniques.core.cost import Cost, Work

from .made import NUM_PARAMETERS, RATES, MadeTraceStore, made_workload

CPU = replace(RATES, asynchronous=False, link_bytes_per_s=None, num_cores=2)


def plain():
    return MadeTraceStore(made_workload(1000)).plain()


def test_products_and_traffic_add_up() -> None:
    seconds = pass_seconds(PassWork(2e12, 50e9, 100), RATES, "float32")
    assert seconds["arithmetic"] == pytest.approx(0.2)
    assert seconds["memory"] == pytest.approx(0.1)
    assert seconds["launch"] == 0.0  # 100 operators are issued long before


def test_launching_is_a_floor_on_cuda_and_adds_up_on_the_cpu() -> None:
    work = PassWork(1e9, 0.0, 10_000)
    assert sum(pass_seconds(work, RATES, "float32").values()) == pytest.approx(0.08)
    assert sum(pass_seconds(work, CPU, "float32").values()) == pytest.approx(0.08 + 1e9 / 10e12)


def test_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"float8.*bfloat16"):
        pass_seconds(PassWork(1.0, 1.0, 1.0), RATES, "float8")


def test_work_grows_with_the_micro_batch() -> None:
    two, four = PassWork.of(plain()), PassWork.of(plain(), 4)
    assert four.flops == 2 * two.flops
    assert four.operators == two.operators


def test_traffic_grows_by_its_slope() -> None:
    profile = replace(plain(), traffic={"forward": 100}, traffic_slopes={"forward": 30.0})
    assert PassWork.of(profile, 5).traffic_bytes == 100 + 3 * 30


FREE = Cost()
WORK = PassWork(1e12, 0.0, 0.0)


def step(cost: Cost = FREE, rates=RATES, num: int = 4, work: PassWork = WORK):
    return step_seconds(work, cost, plain(), rates, "float32", num)


def test_micro_batches_multiply_and_the_step_does_not() -> None:
    once, four = step(num=1), step(num=4)
    assert four.seconds["arithmetic"] == pytest.approx(4 * once.seconds["arithmetic"])
    assert four.seconds["optimizer"] == once.seconds["optimizer"]


def test_recomputed_operators_weigh_more_than_plain_ones() -> None:
    once, twice = PassWork(1e12, 1e9, 100.0), PassWork(1.5e12, 1.2e9, 150.0)
    more = once.recomputing(twice, operator_weight=12.0)
    assert (more.flops, more.traffic_bytes, more.operators) == (0.5e12, pytest.approx(0.2e9), 600.0)
    added = step(rates=CPU, work=once + more).seconds["launch"] - step(rates=CPU, work=once).seconds["launch"]
    assert added == pytest.approx(4 * 600 * CPU.launch_seconds)


def test_traffic_over_the_link_hides_behind_computing_only_where_it_overlaps() -> None:
    moving = Cost(Work(host_link_bytes=1e9))  # 50 ms beside 100 ms of products
    assert step(moving).seconds["link"] == pytest.approx(4 * 0.05)
    assert step(replace(moving, overlap=True)).seconds["link"] == 0.0


def test_optimizer_on_the_cpu_takes_its_measured_seconds() -> None:
    from lightning_memfit.techniques.core.step_cost import cpu_seconds

    assert step(rates=CPU).seconds["optimizer"] == pytest.approx(cpu_seconds("adamw") * NUM_PARAMETERS / 2)


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
    return dict(step_seconds(PassWork(10e12, 0.0, 0.0), cost, plain(), rates, "float32", 2).seconds)


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
