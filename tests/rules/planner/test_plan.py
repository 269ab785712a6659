import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from lightning_memfit.planner import make
from lightning_memfit.planner.candidates import conflict
from lightning_memfit.planner.plan import Plan, is_planned, overlay_of
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.workload import check_allow, check_trainable
from lightning_memfit.techniques.core.setting import Setting

from .made import MIB, MadeTraceStore, made_workload

OWN = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}


def planned(*arguments: Any, **options: Any) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "TraceStore", lambda workload, cache: MadeTraceStore(workload))
        return make.make_plan(made_workload(*arguments, **options))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(1000)


def refused() -> Plan:
    return planned(250, allow=frozenset({"exact"}))


def test_plan_says_what_it_needs_and_what_for(plan: Plan) -> None:
    assert plan.fits
    assert plan.needed_bytes <= plan.usable_bytes <= 1000 * MIB
    assert plan.headroom_bytes >= 0
    assert plan.breakdown.total() == plan.needed_bytes
    assert plan.tokens_per_s == pytest.approx(16 * 8 / plan.seconds_per_step)
    assert {item.technique for item in plan.bought} == {choice.name for choice in plan.setting.chosen}
    assert plan.alternatives


MEASURED = "`MicroBatching()` finds the micro-batch by measured steps."


def test_refusal_says_what_would_help() -> None:
    plan = refused()
    assert not plan.fits
    assert "Nothing fits" in plan.summary()
    assert any("would do" in line for line in plan.advice)
    assert json.loads(json.dumps(plan.to_dict()))["fits"] is False
    with pytest.raises(ValueError, match="Nothing fits"):
        overlay_of(plan, made_workload(250))


def test_memory_that_is_known_at_no_size_is_told_from_what_is_too_large() -> None:
    plan = replace(refused(), advice=(), notes=("Only micro-batch 16 was considered.",))
    assert plan.summary().endswith(f"Only micro-batch 16 was considered. {MEASURED}")


def test_overlay_appends_its_callbacks(plan: Plan) -> None:
    """Those of the recipe are sorted out where it is laid over one: `cli.made_for`."""
    laid = overlay_of(plan, made_workload(1000))
    assert yaml.safe_load(yaml.safe_dump(laid)) == laid
    setting = plan.setting
    assert laid["data"]["init_args"]["batch_size"] == setting.micro_batch_size
    assert laid["trainer"]["accumulate_grad_batches"] == setting.accumulate_grad_batches
    assert laid["trainer"]["precision"] == setting.precision
    classes = [spec["class_path"] for spec in laid["trainer"]["callbacks+"]]
    assert classes[-1] == "lightning_memfit.PlanFeedback"
    assert all(map(is_planned, classes))
    assert not is_planned(OWN["class_path"])
    assert not any("MicroBatching" in name for name in classes)


def cut_by(laid: dict[str, Any]) -> list[dict[str, Any]]:
    """Arguments of the `MicroBatching` of a plan's file."""
    return [spec["init_args"] for spec in laid["trainer"]["callbacks+"] if "MicroBatching" in spec["class_path"]]


@pytest.mark.parametrize(
    ("sizes", "accumulated", "cut"),
    [((2, 16), 4, [{"micro_batch_size": 2}]), ((8, 4), 4, []), ((4, 2), 1, [{"micro_batch_size": 4}])],
)
def test_batches_of_a_loader_that_stays_are_cut_and_as_many_make_a_step(
    plan: Plan, sizes: tuple[int, int], accumulated: int, cut: list[dict[str, Any]]
) -> None:
    setting = replace(plan.setting, micro_batch_size=sizes[0], accumulate_grad_batches=sizes[1])
    laid = overlay_of(replace(plan, setting=setting), replace(made_workload(1000), loader_batch=8))
    assert cut_by(laid) == cut
    assert laid["trainer"]["accumulate_grad_batches"] == accumulated
    assert "data" not in laid


@pytest.mark.parametrize(
    ("sizes", "ranks", "batching", "loaded", "cut"),
    [
        ((2, 4), 1, {}, 8, [{"micro_batch_size": 2}]),
        ((8, 1), 1, {}, 8, []),
        ((8, 1), 2, {}, 8, [{"micro_batch_size": 8}]),  # a mean over what both devices predict
        ((2, 4), 1, {"loss_weight": "mine.tokens"}, 8, [{"loss_weight": "mine.tokens", "micro_batch_size": 2}]),
    ],
)
def test_micro_batches_of_a_recipe_that_cuts_its_batches_stay_cut(
    plan: Plan,
    sizes: tuple[int, int],
    ranks: int,
    batching: dict[str, Any],
    loaded: int,
    cut: list[dict[str, Any]],
) -> None:
    """`MicroBatching` takes means over the whole batch, which accumulation alone doesn't."""
    workload = replace(made_workload(1000), batching=batching)
    setting = replace(plan.setting, micro_batch_size=sizes[0], accumulate_grad_batches=sizes[1], world_size=ranks)
    setting = setting.choose("ddp") if ranks > 1 else setting
    laid = overlay_of(replace(plan, setting=setting), workload)
    assert laid["data"]["init_args"]["batch_size"] == loaded
    assert laid["trainer"]["accumulate_grad_batches"] == 1
    assert cut_by(laid) == cut


def test_engines_accumulate_themselves(plan: Plan) -> None:
    setting = replace(plan.setting, micro_batch_size=2, accumulate_grad_batches=4, world_size=2).choose("zero_2")
    laid = overlay_of(replace(plan, setting=setting), replace(made_workload(1000), batching={}))
    assert laid["data"]["init_args"]["batch_size"] == 2
    assert laid["trainer"]["accumulate_grad_batches"] == 4
    assert cut_by(laid) == []


def test_what_cannot_stand_beside_micro_batching_is_not_planned_for_a_recipe_that_has_it() -> None:
    """`HostMasterWeights` accumulates with the loader's batches, and not with those that are cut."""
    setting = Setting(2, 4).choose("host_master_weights")
    free, cut = made_workload(1000), replace(made_workload(1000), batching={})
    assert not free.is_cut(Setting(2, 4))
    assert cut.is_cut(Setting(2, 4))
    assert "Leave HostMasterWeights out" in str(conflict(setting, cut))
    assert conflict(setting, free) is None


def test_allow() -> None:
    assert check_allow(["bf16", " 8bit "]) == {"exact", "bf16", "8bit"}
    with pytest.raises(ValueError, match=r"fp7.*exact"):
        check_allow(["fp7"])
    with pytest.raises(ValueError, match="empty"):
        check_allow([""])


def test_module_without_training_step() -> None:
    import lightning.pytorch as pl

    class Empty(pl.LightningModule):
        pass

    with pytest.raises(ValueError, match=r"Empty has no `training_step`"):
        check_trainable(Empty())
    with pytest.raises(ValueError, match="LightningModule"):
        check_trainable(object())


def test_without_a_device_there_is_no_plan() -> None:
    workload = made_workload(1000)
    nowhere = replace(workload, target=replace(workload.target, capacity_bytes=None))
    with pytest.raises(ValueError, match="--device"):
        Search(MadeTraceStore(nowhere)).run()
