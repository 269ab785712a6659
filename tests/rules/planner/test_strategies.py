"""Which strategy when: a tree that nobody wrote down, as it comes out of the cost model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_memfit.memory import GIB, Category, Tier
from lightning_memfit.planner import make
from lightning_memfit.planner.candidates import arrangements, candidates
from lightning_memfit.planner.rates import Rates
from lightning_memfit.planner.search import Outcome, Search
from lightning_memfit.planner.solve import Solution
from lightning_memfit.planner.workload import Devices, Limits, Workload
from lightning_memfit.profile.events import CATEGORIES
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.setting import Setting

from .made import MIB, NUM_BLOCKS, NUM_PARAMETERS, RATES, MadeTraceStore, made_workload

EXACT = frozenset({"exact"})
FAST = replace(RATES, interconnect_bytes_per_s=200e9, disk_bytes_per_s=2e9, host_bytes_per_s=40e9, num_cores=8)
"""Devices joined by NVLink."""
SLOW = replace(FAST, interconnect_bytes_per_s=2e9)
NO_DISK = Limits(host_bytes=64 * GIB, disk_bytes=0)
DEVICE_ALONE = Limits(host_bytes=0, disk_bytes=0)
LITTLE_HOST = Limits(host_bytes=1400 * MIB, disk_bytes=100 * GIB)
PER_BLOCK = 16


class Blocks(MadeTraceStore):
    """The made-up module with its weights in as many pieces as a real one's."""

    def plain(self) -> ModelProfile:
        return in_pieces(super().plain())

    def passes(self, setting: Setting, choice: str) -> ModelProfile:
        return in_pieces(super().passes(setting, choice))


def in_pieces(profile: ModelProfile) -> ModelProfile:
    (whole,) = profile.parameters
    names = [f"h.{block}.w{piece}" for block in range(NUM_BLOCKS) for piece in range(PER_BLOCK)]
    return replace(profile, parameters=tuple(replace(whole, name=n, numel=whole.numel // len(names)) for n in names))


@pytest.fixture(autouse=True)
def with_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are under test, not what is installed; and devices of a gigabyte, where NCCL's share would be half."""
    monkeypatch.setattr("lightning_memfit.extras.find_spec", lambda name: object())
    for module in ("planner.memory", "estimate.placement", "estimate.deepspeed"):
        monkeypatch.setattr(f"lightning_memfit.{module}.NCCL_BYTES", MIB)


def workload(usable_mib: int, devices: int = 1, rates: Rates = FAST, limits: Limits = NO_DISK, **more: Any) -> Workload:
    made = made_workload(usable_mib, **{"allow": EXACT, "samples_per_step": 16, **more})
    return replace(made, rates=rates, limits=limits, devices=Devices(devices), strategies=True)


def search(*arguments: Any, **options: Any) -> tuple[Search, Outcome]:
    found = Search(Blocks(workload(*arguments, **options)))  # type: ignore[arg-type]
    return found, found.run()


def strategy(outcome: Outcome) -> str:
    assert outcome.best is not None, [(r.setting.chosen, r.reason) for r in outcome.rejected]
    chosen = outcome.best.setting.of_kind("strategy")
    return chosen.name if chosen is not None else "one device"


def best(*arguments: Any, **options: Any) -> str:
    return strategy(search(*arguments, **options)[1])


# --- the tree ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usable_mib", "options", "wanted"),
    [
        (40_000, {}, {"one device"}),
        (40_000, {"devices": 2, "rates": replace(FAST, interconnect_bytes_per_s=2e7)}, {"one device"}),
        (40_000, {"devices": 2}, {"ddp"}),
        (560, {"devices": 8, "limits": DEVICE_ALONE}, {"zero_3", "fsdp2"}),
    ],
)
def test_the_fewest_divisions_that_fit(usable_mib: int, options: dict[str, Any], wanted: set[str]) -> None:
    _, outcome = search(usable_mib, **options)
    assert strategy(outcome) in wanted
    assert outcome.best is not None
    assert outcome.best.setting.global_batch_size == 16


def test_states_are_divided_where_copies_do_not_fit() -> None:
    _, outcome = search(1000, devices=4, limits=DEVICE_ALONE)
    assert strategy(outcome) in ("zero_1", "zero_2", "zero_3", "fsdp2")
    assert any(rejected.setting.has("ddp") and "over" in rejected.reason for rejected in outcome.rejected)


class Factors(MadeTraceStore):
    """A module whose own optimizer keeps something besides what it keeps of each element."""

    def plain(self) -> ModelProfile:
        profile = super().plain()
        events = profile.events
        is_state = events.categories == CATEGORIES.index(Category.OPTIMIZER_STATE)
        sizes = events.sizes + np.where(is_state, 16, 0)
        return replace(profile, events=replace(events, sizes=sizes, site_names=("weight",)))


def test_states_that_deepspeed_can_not_divide_are_left_to_others() -> None:
    outcome = Search(Factors(workload(1000, devices=4, limits=DEVICE_ALONE))).run()  # type: ignore[arg-type]
    assert strategy(outcome) == "fsdp2"
    assert "no fixed number of values per element" in reasons(outcome)
    assert not any(solution.setting.has(f"zero_{stage}") for solution in outcome.solutions for stage in (1, 2, 3))


def test_weights_stay_whole_as_long_as_they_fit() -> None:
    """Stage 3 gathers weights in every pass, and slow links make that dear."""
    found, outcome = search(940, devices=4, rates=replace(SLOW, interconnect_bytes_per_s=5e8), limits=DEVICE_ALONE)
    assert strategy(outcome) in ("zero_1", "zero_2")
    times = {}
    for stage in (2, 3):
        solution = found.solver.solve(Setting(world_size=4).choose(f"zero_{stage}"))
        times[stage] = solution.time.total
    assert times[2] < times[3]


def test_host_memory_where_the_device_is_too_small() -> None:
    _, outcome = search(900)
    assert outcome.best is not None
    assert outcome.best.breakdown.total(Tier.HOST) + outcome.best.breakdown.total(Tier.PINNED_HOST) > 0
    assert outcome.best.breakdown.total(Tier.DISK) == 0
    assert "offload" in best(560)


def test_disk_where_host_memory_is_too_small() -> None:
    _, outcome = search(500, limits=LITTLE_HOST)
    assert strategy(outcome).startswith("zero_infinity")
    assert outcome.best is not None
    assert outcome.best.breakdown.total(Tier.DISK) >= 16 * NUM_PARAMETERS
    assert "offload" in best(500, limits=replace(LITTLE_HOST, host_bytes=64 * GIB))


# --- limits -----------------------------------------------------------------------------------------------------------


def reasons(outcome: Outcome) -> str:
    return " | ".join(rejected.reason for rejected in outcome.rejected)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"disk_bytes": 0}, "of disk, and there is none that may be used"),
        ({"disk_bytes": GIB // 2}, "over the 512.00 MiB there are"),
        ({"disk_writes_per_day": GIB}, "per day to disk"),
        ({"disk_writes_per_day": 1 << 50}, ""),
    ],
)
def test_a_disk_that_is_too_small_or_would_wear_out_is_left_alone(limits: dict[str, int], reason: str) -> None:
    outcome = search(500, limits=replace(LITTLE_HOST, **limits))[1]  # type: ignore[arg-type]
    assert strategy(outcome).startswith("zero_infinity") if not reason else outcome.best is None
    assert reason in reasons(outcome)


def test_host_memory_is_shared_by_the_devices_of_a_machine() -> None:
    two = search(560, devices=2, limits=Limits(host_bytes=100 * MIB, disk_bytes=0))[1]
    assert "of host memory for 2 devices" in reasons(two)


def test_page_locked_memory_is_a_limit_of_its_own() -> None:
    roomy = Limits(host_bytes=64 * GIB, disk_bytes=0)
    assert "offload" in best(560, limits=roomy)
    little = search(560, limits=replace(roomy, pinned_bytes=100 * MIB))[1]
    assert "of page-locked host memory" in reasons(little)
    assert little.best is None


def test_samples_that_cannot_be_shared_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"16 samples .* among 3 devices"):
        workload(1000, devices=3)


# --- search -----------------------------------------------------------------------------------------------------------


def test_without_strategies_there_is_one_device() -> None:
    assert arrangements(made_workload(1000)) == [Setting()]


def test_one_device_is_offered_what_offloads_and_several_everything() -> None:
    def offered(devices: int) -> set[str]:
        chosen = [base.of_kind("strategy") for base in arrangements(workload(1000, devices=devices))]
        return {choice.name for choice in chosen if choice is not None}

    offloading = {"zero_offload", "zero_3_offload_optimizer", "zero_3_offload"}
    assert offered(1) == offloading | {"zero_infinity_optimizer", "zero_infinity"}
    assert offered(2) == offered(1) | {"ddp", "fsdp2", "zero_1", "zero_2", "zero_3"}


def test_bounds_are_bounds_and_nothing_is_faster() -> None:
    for usable, devices, rates in ((1000, 4, SLOW), (560, 1, FAST), (1100, 2, FAST)):
        found, outcome = search(usable, devices=devices, rates=rates)
        assert outcome.best is not None
        for setting in candidates(found.workload)[0]:
            if found.bound.least_bytes(setting) > found.solver.budget.usable_bytes:
                continue
            solution = found.solver.solve(setting)
            if hasattr(solution, "time"):
                traced = found.bound.traced_seconds(setting)
                assert found.bound.seconds(setting) <= traced <= solution.time.total * (1 + 1e-9)
                assert found.bound.least_bytes(setting) <= solution.needed_bytes
                alike = 1.05 if devices > 1 else 1.005
                assert outcome.best.time.total <= solution.time.total * (alike + 0.001)


def test_eight_bit_states_take_the_options_that_deepspeed_needs() -> None:
    kept, _ = candidates(workload(1000, devices=2, allow=frozenset({"exact", "8bit"})))
    chosen = [s.of_kind("optimizer") for s in kept if s.has("zero_2") and s.has("optimizer_8bit")]
    assert chosen
    assert all(choice.options == {"keep_32bit_embeddings": False} for choice in chosen if choice is not None)


def test_half_precision_of_deepspeed_has_to_be_allowed_even_if_the_recipe_is_mixed() -> None:
    made = workload(1000, devices=2)
    mixed = replace(made, options=replace(made.options, precision="bf16-mixed"))
    for wanted, allow in ((False, EXACT), (True, EXACT | {"bf16"})):
        kept, _ = candidates(replace(mixed, allow=allow))
        assert any(s.has("ddp") and s.precision == "bf16-mixed" for s in kept)
        assert any(s.has("zero_2") and s.precision == "bf16-mixed" for s in kept) is wanted


def test_strategies_trace_nothing_of_their_own() -> None:
    store = Blocks(workload(1100, devices=2))
    Search(store).run()  # type: ignore[arg-type]
    assert all(asked[1].of_kind("strategy") is None for asked in store.asked)


def test_a_trace_that_refutes_a_plan_takes_room_from_its_strategy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ZeRO-1 withheld 7 GiB from every setting."""
    found, outcome = search(1400, devices=2)
    assert outcome.best is not None
    refuted = outcome.best.setting.of_kind("strategy")
    assert refuted is not None
    asked: list[str] = []

    def verify(self: Search, solution: Solution) -> Solution:
        strategy = solution.setting.of_kind("strategy")
        asked.append("" if strategy is None else strategy.name)
        over = GIB if asked[-1] == refuted.name else 0
        return replace(solution, needed_bytes=(self.workload.target.usable_bytes or 0) + over - 1)

    monkeypatch.setattr(Search, "verify", verify)
    another = make._searched(found)
    assert asked[0] == refuted.name
    assert another.best is not None
    assert found.solver.budget.usable_by(outcome.best.setting) < found.solver.budget.usable_by(another.best.setting)


def test_every_table_shows_the_figures_that_a_trace_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen plan had those of its trace, and "the same" in other tables those of the prediction."""
    monkeypatch.setattr(make, "TraceStore", lambda changed, *_: Blocks(changed))

    def verify(self: Search, solution: Solution) -> Solution:
        self._verified[solution.setting] = replace(solution, needed_bytes=solution.needed_bytes - 7 * MIB)
        return self._verified[solution.setting]

    monkeypatch.setattr(Search, "verify", verify)
    plan = make.make_plan(workload(20_000, devices=2), compare=True).to_dict()
    same = [one for one in plan["rows"] if one["label"] == plan["label"]]
    assert same
    assert {one["needed_bytes"] for one in same} == {plan["needed_bytes"]}
