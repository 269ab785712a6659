import json
from dataclasses import replace

import pytest
import yaml

from lightning_memfit.planner.plan import Plan, is_planned, overlay_of
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.workload import check_allow, check_trainable

from .made import MIB, MadeTraceStore, made_workload

OWN = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    from lightning_memfit.planner import make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "TraceStore", lambda workload, cache, overlap: MadeTraceStore(workload))
        return make.make_plan(made_workload(1000))


def refused() -> Plan:
    from lightning_memfit.planner import make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "TraceStore", lambda workload, cache, overlap: MadeTraceStore(workload))
        return make.make_plan(made_workload(250, allow=frozenset({"exact"})))


def test_plan_says_what_it_needs_and_what_for(plan: Plan) -> None:
    assert plan.fits
    assert plan.exit_code == 0
    assert plan.needed_bytes <= plan.usable_bytes <= 1000 * MIB
    assert plan.headroom_bytes >= 0
    assert plan.breakdown.total() == plan.needed_bytes
    assert plan.tokens_per_s == pytest.approx(16 * 8 / plan.seconds_per_step)
    assert {item.technique for item in plan.bought} == {choice.name for choice in plan.setting.chosen}
    assert plan.alternatives
    assert plan.largest_micro_batch >= plan.setting.micro_batch_size


def test_plan_that_its_own_trace_refutes_is_made_again() -> None:
    from dataclasses import replace

    from lightning_memfit.planner import make

    class Refuting(MadeTraceStore):
        def needs_more(self, profile):  # type: ignore[no-untyped-def]
            count = sum(asked[0] == "exactly" for asked in self.asked)
            sizes = profile.events.sizes * (100 if count == 1 else 0)
            return replace(profile, events=replace(profile.events, sizes=sizes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "TraceStore", lambda workload, cache, overlap: Refuting(workload))
        plan = make.make_plan(made_workload(200_000, allow=frozenset({"exact"})), verify=True)
    assert plan.fits
    assert plan.usable_bytes < 0.97 * 200_000 * MIB - 1
    assert plan.verified_bytes is not None


def test_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    with pytest.raises(ValueError, match="format"):
        Plan.from_dict({**plan.to_dict(), "format": 0})


def test_refusal_says_what_would_help() -> None:
    plan = refused()
    assert not plan.fits
    assert plan.exit_code == 1
    assert "Nothing fits" in plan.summary()
    assert any("would do" in line for line in plan.advice)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    with pytest.raises(ValueError, match="Nothing fits"):
        overlay_of(plan, True)


def test_overlay_appends_its_callbacks(plan: Plan) -> None:
    """Those of the recipe are sorted out where it is laid over one: `cli.made_for`."""
    laid = overlay_of(plan, batch_size_in_data=True)
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


def test_without_a_batch_size_in_data_micro_batches_are_cut(plan: Plan) -> None:
    laid = overlay_of(plan, batch_size_in_data=False)
    cut = [spec for spec in laid["trainer"]["callbacks+"] if "MicroBatching" in spec["class_path"]]
    if plan.setting.accumulate_grad_batches > 1:
        assert cut[0]["init_args"] == {"micro_batch_size": plan.setting.micro_batch_size}
    assert "data" not in laid


def test_micro_batches_of_a_recipe_that_cuts_its_batches_stay_cut(plan: Plan) -> None:
    """`MicroBatching` takes means over the whole batch, which accumulation alone doesn't."""
    setting = replace(plan.setting, micro_batch_size=2, accumulate_grad_batches=4)
    laid = overlay_of(replace(plan, setting=setting), batch_size_in_data=True, cuts_batches=True)
    assert laid["data"]["init_args"]["batch_size"] == 8
    assert laid["trainer"]["accumulate_grad_batches"] == 1
    cut = [spec for spec in laid["trainer"]["callbacks+"] if "MicroBatching" in spec["class_path"]]
    assert [spec["init_args"] for spec in cut] == [{"micro_batch_size": 2}]
    whole = replace(plan, setting=replace(setting, micro_batch_size=8, accumulate_grad_batches=1))
    laid = overlay_of(whole, batch_size_in_data=True, cuts_batches=True)
    assert laid["data"]["init_args"]["batch_size"] == 8
    engine = replace(plan, setting=replace(setting, world_size=2).choose("zero_2"))
    laid = overlay_of(engine, batch_size_in_data=True, cuts_batches=True)
    assert laid["data"]["init_args"]["batch_size"] == 2
    assert laid["trainer"]["accumulate_grad_batches"] == 4


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
    from dataclasses import replace

    workload = made_workload(1000)
    nowhere = replace(workload, target=replace(workload.target, capacity_bytes=None))
    with pytest.raises(ValueError, match="--device"):
        Search(MadeTraceStore(nowhere)).run()
