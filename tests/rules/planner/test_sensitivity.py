"""What other limits would bring: a search for each, on the traces of the first."""

from dataclasses import replace
from typing import Any

import pytest

from cli.plan import print_plan
from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.memory import GIB
from lightning_memfit.planner import make as module
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.plan import Plan, Sensitivity
from lightning_memfit.planner.plan_page import render_plan
from lightning_memfit.planner.sensitivity import sensitivities_of
from lightning_memfit.planner.tried import Explored
from lightning_memfit.planner.workload import Devices, Limits, Workload

from .made import MadeTraceStore, made_workload

EXACT = frozenset({"exact"})
TIGHT = 1400
"""MiB in which blocks have to be checkpointed."""


def compared(workload: Workload) -> tuple[Plan, dict[str, Sensitivity], MadeTraceStore]:
    store = MadeTraceStore(workload)
    traced: list[int] = []

    def made(changed: Workload, *_: Any) -> MadeTraceStore:
        store.workload = changed
        return store

    def noted(*given: Any) -> Any:
        traced.append(len(set(store.asked)))
        return sensitivities_of(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TraceStore", made)
        # Rows trace the recipe's own step, and are not what is tested.
        patch.setattr(module, "rows_of", lambda *_: ())
        patch.setattr(module, "sensitivities_of", noted)
        plan = make_plan(workload, compare=True, other_limits=True)
    assert [len(set(store.asked))] == traced, "a trace was made"
    return plan, {one.change: one for one in plan.sensitivities}, store


def full_plan(workload: Workload) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TraceStore", lambda changed, *_: MadeTraceStore(changed))
        return make_plan(workload)


def with_more(workload: Workload, gibs: int) -> Workload:
    capacity = (workload.target.capacity_bytes or 0) + gibs * GIB
    return replace(
        workload,
        target=replace(workload.target, capacity_bytes=capacity, margin_bytes=safety_margin_bytes(capacity)),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("gibs", [1, 4])
def test_more_memory_gives_the_plan_of_a_search_of_its_own(gibs: int) -> None:
    workload = made_workload(TIGHT, allow=EXACT, limits=Limits(host_bytes=0))
    plan, found, _ = compared(workload)
    one = found[f"{gibs} GiB more on the device"]
    there = full_plan(with_more(workload, gibs))
    assert one.seconds_per_step == pytest.approx(there.seconds_per_step)
    assert one.saved == pytest.approx(1 - there.seconds_per_step / plan.seconds_per_step)
    assert one.saved > 0.005
    assert one.needed_bytes <= there.usable_bytes


def test_memory_that_brings_nothing_says_so() -> None:
    plan, found, _ = compared(made_workload(100_000, allow=EXACT, limits=Limits(host_bytes=0)))
    one = found["4 GiB more on the device"]
    assert one.label == plan.to_dict()["label"]
    assert one.effect == "no faster, as far as was traced"
    assert not any("--host-memory" in change for change in found)  # nothing that it lets in is faster


@pytest.mark.nightly
def test_another_device_is_the_next_number_that_shares_the_batch() -> None:
    made = made_workload(4000, allow=EXACT, samples_per_step=9)
    rates = replace(made.rates, disk_bytes_per_s=2e9, interconnect_bytes_per_s=50e9)
    workload = replace(made, strategies=True, devices=Devices(1), rates=rates)
    _, found, _ = compared(workload)
    assert not any("devices" in change for change in found)  # 9 samples can't be shared by two
    _, found, _ = compared(replace(workload, samples_per_step=8))
    assert found["2 devices"].saved > 0.2
    _, found, _ = compared(replace(workload, samples_per_step=12, devices=Devices(4)))
    assert "6 devices" in found  # 5 don't divide the batch
    _, found, _ = compared(replace(workload, strategies=False, samples_per_step=8))
    assert "2 devices" not in found


def test_speed_alone_is_named_where_it_is_faster() -> None:
    workload = replace(made_workload(100_000, allow=frozenset({"exact", "tf32"})), tolerance=3.0)
    plan, found, _ = compared(workload)
    assert plan.changes == ()
    faster = found.get("speed alone (`--tolerance 0%`)")
    if faster is not None:  # only where the lossy one was traced
        assert faster.changes
        assert faster.saved > 0.005


def test_table_and_page_show_them_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    plan, found, _ = compared(made_workload(TIGHT, allow=EXACT, limits=Limits(host_bytes=0)))
    print_plan(plan.to_dict(), is_verbose=True)
    output = capsys.readouterr().out
    print_plan(plan.to_dict())
    assert "The plan under other limits" not in capsys.readouterr().out
    assert "The plan under other limits" in output
    assert " ".join(found["4 GiB more on the device"].effect.split()[:3]) in output  # the rest is folded
    marked = replace(plan, sensitivities=(replace(plan.sensitivities[0], change="<b>[red]more[/red]"),))
    print_plan(marked.to_dict(), is_verbose=True)
    assert "<b>[red]more[/red]" in capsys.readouterr().out
    page = render_plan(marked.to_dict(), Explored((), (), 0, (), 0.0), [])
    assert "&lt;b&gt;[red]more[/red]" in page
    assert "<b>[red]" not in page
    alone = render_plan(replace(plan, sensitivities=()).to_dict(), Explored((), (), 0, (), 0.0), [])
    assert "under other limits" not in alone
