from dataclasses import replace

import pytest

from lightning_memfit.planner.candidates import Rejected
from lightning_memfit.planner.lower_bound import LowerBound
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.solve import Solution, Solver
from lightning_memfit.planner.time import StepTime
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.setting import Setting

from .made import MadeTraceStore, made_work, made_workload

ROOMY, TIGHT = 40_000, 1400
PLAIN = Setting()
CHUNKED = PLAIN.choose("chunked_loss")


def search_with(usable_mib: int, *traced: Setting) -> Search:
    """With the passes of some settings traced, every choice, and the plain ones of all others."""
    found = Search(MadeTraceStore(made_workload(usable_mib)))  # type: ignore[arg-type]
    for setting in traced:
        for choice in ("none", "full", "keep_matmul_attention"):
            found.store.passes(setting, choice)  # type: ignore[arg-type]
    return found


def num_asked(found: Search) -> int:
    return len(set(found.store.asked))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["fused_adamw", "paged_optimizer"])
@pytest.mark.parametrize("usable_mib", [ROOMY, TIGHT])
def test_no_plan_is_better_than_the_lower_bounds_which_takes_no_trace(name: str, usable_mib: int) -> None:
    setting = PLAIN.choose(name)
    found = search_with(usable_mib, PLAIN)
    before = num_asked(found)
    least = found.bound.solve(setting)
    assert num_asked(found) == before
    exact = Solver(found.store).solve(setting)
    assert isinstance(exact, Solution)
    assert isinstance(least, Solution)
    assert least.time.total <= exact.time.total
    assert least.needed_bytes <= exact.needed_bytes


def test_blocks_are_lent_to_another_loss() -> None:
    found = search_with(TIGHT, CHUNKED)
    found.store.passes(PLAIN, "none")
    before = num_asked(found)
    least = found.bound.solve(PLAIN)
    assert num_asked(found) == before
    exact = Solver(found.store).solve(PLAIN)
    if isinstance(exact, Solution):
        assert isinstance(least, Solution)
        assert least.time.total <= exact.time.total
    else:
        assert isinstance(least, Solution | Rejected)


def test_nothing_is_said_of_what_nothing_is_known() -> None:
    found = search_with(TIGHT)
    found.store.passes(PLAIN, "none")
    assert found.bound.solve(PLAIN) is None


def test_combinations_that_cannot_be_better_are_passed_over_with_how_much_slower_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solve = LowerBound.solve

    def slow(self: LowerBound, setting: Setting) -> Solution | Rejected | None:
        found = solve(self, setting)
        return replace(found, time=StepTime({"arithmetic": 1000.0})) if isinstance(found, Solution) else found

    def search() -> tuple[int, float, set[float]]:
        outcome = Search(MadeTraceStore(made_workload(800))).run()  # type: ignore[arg-type]
        assert outcome.best is not None
        return len(outcome.solutions), outcome.best.time.total, {r.seconds for r in outcome.rejected if r.seconds}

    several, _, _ = search()
    monkeypatch.setattr(LowerBound, "solve", slow)
    one, _, seconds = search()
    assert several > one == 1
    assert seconds == {1000.0}


def test_adapters_save_the_gradients_of_frozen_weights() -> None:
    """A bound above what a combination takes would pass it over."""

    class Frozen(MadeTraceStore):
        def passes(self, setting: Setting, choice: str) -> ModelProfile:
            found = super().passes(setting, choice)
            if setting.of_kind("adapter") is None:
                return found
            # Without gradients of weights, and in the first block without that of its input.
            return replace(found, work=made_work({"forward": 2e12, "backward": 2e12 * 3 / 4}))

    found = Search(Frozen(made_workload(ROOMY)))  # type: ignore[arg-type]
    for setting in (PLAIN, PLAIN.choose("lora")):
        assert found.bound.seconds(setting) <= found.bound.traced_seconds(setting)
    assert found.bound.seconds(PLAIN.choose("lora")) < found.bound.seconds(PLAIN)
