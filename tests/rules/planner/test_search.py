from dataclasses import replace

import pytest

from lightning_memfit.memory import Category, Tier
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.planner import candidates as module
from lightning_memfit.planner.candidates import candidates, missing_permissions
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.memory import standing_bytes, stored_as
from lightning_memfit.planner.numerics import NumericsOf
from lightning_memfit.planner.search import Outcome, Search
from lightning_memfit.planner.time import PassWork
from lightning_memfit.planner.workload import Devices, Limits
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.setting import Setting, TechniqueChoice

from .made import MIB, NUM_PARAMETERS, MadeTraceStore, made_workload

EXACT = frozenset({"exact"})


def search(usable_mib: int, **options: object) -> tuple[Search, Outcome]:
    found = Search(MadeTraceStore(made_workload(usable_mib, **options)))  # type: ignore[arg-type]
    return found, found.run()


def names(setting: Setting) -> set[str]:
    return {choice.name for choice in setting.chosen}


def test_an_optimizer_is_exchanged_for_its_own_kind_only() -> None:
    class Plain(MadeTraceStore):
        def plain(self) -> ModelProfile:
            return replace(super().plain(), optimizer="SGD")

    workload = made_workload(1400, allow=EXACT)
    unknown = replace(workload, facts=replace(workload.facts, optimizers=()))
    found = {kind: Search(kind(unknown)).run() for kind in (MadeTraceStore, Plain)}  # type: ignore[arg-type]
    tried = {
        kind: {name for solution in outcome.solutions for name in names(solution.setting)}
        for kind, outcome in found.items()
    }
    assert "fused_adamw" in tried[MadeTraceStore]
    assert "fused_adamw" not in tried[Plain]
    assert any("SGD would become torch.AdamW" in one.reason for one in found[Plain].rejected)


def test_less_memory_is_never_faster() -> None:
    times = [search(size, allow=EXACT)[1].best for size in (40_000, 1600, 1400, 1250)]
    seconds = [best.time.total for best in times if best is not None]
    assert len(seconds) >= 3
    assert seconds == sorted(seconds)


def test_too_small_a_device_fits_nothing_and_says_how_much_is_missing() -> None:
    _, outcome = search(300)
    assert outcome.best is None
    assert any("over" in rejected.reason and rejected.needed_bytes for rejected in outcome.rejected)


def test_where_only_tensors_count_less_is_left_free() -> None:
    workload = made_workload(1000)
    tensors = replace(workload, target=replace(workload.target, counts_tensors=True))
    usable = [Search(MadeTraceStore(w)).solver.budget.usable_bytes for w in (workload, tensors)]  # type: ignore[arg-type]
    assert usable[0] < 0.98 * usable[1] < 0.98 * 1000 * MIB


def test_result_does_not_depend_on_the_order_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    before = search(1000)[1].best
    backwards = tuple(reversed(module.techniques()))
    monkeypatch.setattr(module, "techniques", lambda: backwards)
    after = search(1000)[1].best
    assert before is not None
    assert after is not None
    assert before.setting == after.setting
    assert before.time.total == after.time.total


class OneSizeStore(MadeTraceStore):
    """Some checkpointing choices, and perhaps the plain step, are known at the traced micro-batch only."""

    choices: tuple[str, ...] = ()

    def passes(self, setting: Setting, choice: str) -> ModelProfile:
        found = super().passes(setting, choice)
        if choice in self.choices:
            return replace(found, slopes=None, larger=None, only_this_size="its layout changes")
        return found


@pytest.mark.parametrize("choice", ["full", "keep_matmul_attention"])
def test_a_choice_that_is_known_at_one_size_does_not_bind_the_others(choice: str) -> None:
    class Store(OneSizeStore):
        choices = (choice,)

    workload = made_workload(40_000, allow=EXACT)
    best = Search(Store(workload)).run().best  # type: ignore[arg-type]
    wanted = Search(MadeTraceStore(workload)).run().best  # type: ignore[arg-type]
    assert best is not None
    assert wanted is not None
    assert best.setting == wanted.setting
    assert best.setting.micro_batch_size == 8


def test_a_plan_says_that_one_size_is_all_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(OneSizeStore):
        choices = ("none", "full", "keep_matmul_attention")

        def plain(self) -> ModelProfile:
            return replace(super().plain(), slopes=None, larger=None, only_this_size="its layout changes")

    monkeypatch.setattr("lightning_memfit.planner.make.TraceStore", lambda workload, *_: Store(workload))
    plan = make_plan(made_workload(40_000, allow=EXACT))
    assert plan.setting is not None
    assert plan.setting.micro_batch_size == 2
    assert "Only micro-batch 2 was considered" in plan.notes[0]
    assert "its layout changes" in plan.notes[0]


def test_search_visits_less_than_everything() -> None:
    _, outcome = search(40_000)
    candidates = len(outcome.solutions) + len(outcome.rejected) + len(outcome.unvisited)
    assert candidates > 20
    assert len(outcome.solutions) < candidates / 2


def test_only_what_is_allowed_is_proposed() -> None:
    for setting in candidates(made_workload(1000, allow=EXACT))[0]:
        assert setting.numerics == frozenset()
    allowed = {name for s in candidates(made_workload(1000))[0] for name in names(s)}
    assert "optimizer_8bit" in allowed
    assert "lion" not in allowed
    assert "bf16_true" not in allowed


def test_clipping_by_norm_keeps_gradient_release_out() -> None:
    kept, refused = candidates(made_workload(1000))
    assert all("gradient_release" not in names(setting) for setting in kept)
    assert any("gradient_clip_val" in rejected.reason for rejected in refused)


def test_host_memory_is_a_limit() -> None:
    _, free = search(1000, allow=EXACT)
    assert free.best is not None
    assert "paged_optimizer" in names(free.best.setting)
    assert free.best.breakdown.total(Tier.HOST) == 8 * NUM_PARAMETERS
    _, tight = search(1000, allow=EXACT, limits=Limits(host_bytes=100 * MIB))
    assert all("paged_optimizer" not in names(s.setting) for s in tight.solutions)
    assert any("host memory" in rejected.reason for rejected in tight.rejected)


def test_host_masters_leave_half_precision_weights_on_the_device() -> None:
    found, _ = search(1000, allow=EXACT)
    model = found.solver.models.of(Setting().choose("host_master_weights"))
    count = NUM_PARAMETERS
    assert model.off_device().total(Tier.HOST) == 4 * count + 4 * count + 8 * count
    assert model.off_device().total(Tier.PINNED_HOST) == 2 * count


def test_pinned_buffers_of_host_masters_are_powers_of_two() -> None:
    class Uneven(MadeTraceStore):
        def passes(self, setting: Setting, choice: str) -> ModelProfile:
            sizes = {"table": 3 * MIB, "weight": MIB + 1, "empty": 0}
            table = tuple(ParameterInfo(name, numel, 4, shape=(numel,), dims=1) for name, numel in sizes.items())
            return replace(super().passes(setting, choice), parameters=table)

    model = Search(Uneven(made_workload(1000))).solver.models.of(  # type: ignore[arg-type]
        Setting().choose("host_master_weights")
    )
    pinned = model.off_device().by_category(Tier.PINNED_HOST)
    assert pinned[Category.COMMUNICATION] == 2 * (4 * MIB + 1)
    assert sum(pinned.values()) == 2 * (4 * MIB + 2 * MIB)


@pytest.mark.parametrize(
    ("technique", "itemsize", "per_parameter"),
    [
        ("tf32", 4, 16),
        ("host_master_weights", 2, 2),
        ("optimizer_8bit", 4, 10),
        ("paged_optimizer", 4, 8),
        ("lora", 4, 4),
        ("lora", 2, 2),
        ("qlora", 4, 0.5),
    ],
)
def test_standing_bytes_by_closed_form(technique: str, itemsize: int, per_parameter: float) -> None:
    profile = MadeTraceStore(made_workload(1000)).plain()
    found = standing_bytes(Setting().choose(technique), profile.optimizer, stored_as(profile.parameters, itemsize))
    assert per_parameter * NUM_PARAMETERS <= found <= 1.01 * per_parameter * NUM_PARAMETERS


def test_a_recipes_own_adapters_are_in_every_combination_and_change_nothing() -> None:
    own = TechniqueChoice("qlora", {"rank": 4})
    workload = made_workload(1000, adapter=own)
    kept, refused = candidates(workload)
    assert kept
    assert {setting.of_kind("adapter") for setting in (*kept, *(one.setting for one in refused))} == {own}
    numerics = NumericsOf(workload)
    assert numerics.severity(Setting(chosen=(own,))) == 0
    assert numerics.changes(Setting(chosen=(own,))) == ()
    assert NumericsOf(made_workload(1000)).severity(Setting(chosen=(own,))) > 0
    assert {one.name for one, _ in missing_permissions(workload)}.isdisjoint({"lora", "qlora", "lora_8bit"})


def test_a_recipes_own_adapters_are_in_the_step_that_a_search_begins_with() -> None:
    """The bound doesn't leave out twice what they don't compute, and they are nothing that the plan has chosen."""
    own = TechniqueChoice("lora", {"rank": 4})
    workload = made_workload(10_000, adapter=own)
    found = Search(MadeTraceStore(workload))  # type: ignore[arg-type]
    adapted = Setting(chosen=(own,))
    work = PassWork.of_products(sum(found.plain.flops.values()) / 2 * 8, "float32")
    assert found.bound.seconds(adapted) == found.solver.time.step(adapted, work, 1).total
    other = Search(MadeTraceStore(made_workload(10_000)))  # type: ignore[arg-type]
    assert other.bound.seconds(adapted) < found.bound.seconds(adapted)


@pytest.mark.parametrize(("adapter", "divided"), [("lora", True), ("qlora", False)])
def test_adapters_go_with_strategies_that_divide_weights_unless_these_are_quantized(
    adapter: str, divided: bool
) -> None:
    workload = made_workload(1000, adapter=TechniqueChoice(adapter, {}), devices=Devices(2), strategies=True)
    kept, refused = candidates(workload)
    names = {one.of_kind("strategy").name if one.of_kind("strategy") else "" for one in kept}
    assert names > {"ddp"} if divided else names <= {"", "ddp"}
    assert any("can't divide weights in 4 or 8 bits" in one.reason for one in refused) != divided
