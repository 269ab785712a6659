from dataclasses import replace

import pytest

from lightning_memfit.planner.candidates import Rejected
from lightning_memfit.planner.lower_bound import Optimist
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.solve import Solution
from lightning_memfit.planner.time import StepTime
from lightning_memfit.techniques.core.setting import Setting

from .made import MadeLaboratory, made_workload

ROOMY, TIGHT = 40_000, 1400
PLAIN = Setting()
CHUNKED = PLAIN.choose("chunked_loss")


def optimist(usable_mib: int, *traced: Setting) -> Optimist:
    """With the passes of some settings traced, every choice, and the plain ones of all others."""
    found = Search(MadeLaboratory(made_workload(usable_mib)))  # type: ignore[arg-type]
    for setting in traced:
        for choice in ("none", "full", "keep_matmul_attention"):
            found.laboratory.passes(setting, choice)  # type: ignore[arg-type]
    return Optimist(found)


def num_asked(found: Optimist) -> int:
    return len(set(found.laboratory.asked))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["fused_adamw", "paged_optimizer"])
@pytest.mark.parametrize("usable_mib", [ROOMY, TIGHT])
def test_no_plan_is_better_than_the_optimists_which_takes_no_trace(name: str, usable_mib: int) -> None:
    setting = PLAIN.choose(name)
    found = optimist(usable_mib, PLAIN)
    before = num_asked(found)
    least = found.least(setting)
    assert num_asked(found) == before
    exact = Search(found.laboratory).solve(setting)
    assert isinstance(exact, Solution)
    assert isinstance(least, Solution)
    assert least.time.total <= exact.time.total
    assert least.needed_bytes <= exact.needed_bytes


def test_blocks_are_lent_to_another_loss() -> None:
    found = optimist(TIGHT, CHUNKED)
    found.laboratory.passes(PLAIN, "none")
    before = num_asked(found)
    least = found.least(PLAIN)
    assert num_asked(found) == before
    exact = Search(found.laboratory).solve(PLAIN)
    if isinstance(exact, Solution):
        assert isinstance(least, Solution)
        assert least.time.total <= exact.time.total
    else:
        assert isinstance(least, Solution | Rejected)


def test_nothing_is_said_of_what_nothing_is_known() -> None:
    found = optimist(TIGHT)
    found.laboratory.passes(PLAIN, "none")
    assert found.least(PLAIN) is None


def test_what_fits_nowhere_is_refused_without_a_trace() -> None:
    found = optimist(300, PLAIN)
    least = found.least(PLAIN.choose("fused_adamw"))
    assert isinstance(least, Rejected)
    assert "needs" in least.reason


def test_combinations_that_cannot_be_better_are_passed_over_with_how_much_slower_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(self: Optimist, setting: Setting) -> Solution | Rejected | None:
        found = self.solve(setting)
        return replace(found, time=StepTime({"arithmetic": 1000.0})) if isinstance(found, Solution) else found

    def search() -> tuple[int, float, set[str]]:
        outcome = Search(MadeLaboratory(made_workload(800))).run()  # type: ignore[arg-type]
        assert outcome.best is not None
        return len(outcome.solutions), outcome.best.time.total, {r.reason for r in outcome.rejected if r.slower}

    several, _, _ = search()
    monkeypatch.setattr(Optimist, "least", slow)
    one, best, reasons = search()
    assert several > one == 1
    assert reasons == {f"at least {1000.0 / best - 1:.0%} slower"}
