"""When rungs are taken and given up."""

import pytest

from lightning_memfit.fitting.recovery.ladder import Ladder, Rung
from lightning_memfit.fitting.size.sizes import STEPS_BEFORE_GROWTH
from lightning_memfit.fitting.step.ranks import Agreement


class Note(Rung):
    """A rung that does nothing but say so."""

    def __init__(self, name: str, reason: str | None = None) -> None:
        self.name = name
        self.reason = reason
        self.is_applied = False

    @property
    def description(self) -> str:
        return f"{self.name} {'on' if self.is_applied else 'off'}"

    def refusal(self) -> str | None:
        return self.reason

    def apply(self) -> None:
        assert self.reason is None
        assert not self.is_applied
        self.is_applied = True

    def remove(self) -> None:
        self.is_applied = False


def made(*rungs: Rung) -> Ladder:
    return Ladder(rungs, Agreement(1))


def quiet(ladder: Ladder) -> int:
    """Steps without failure until a rung is given up, 0 if none is."""
    return next((step for step in range(1, 20_000) if ladder.succeed()), 0)


def test_rungs_that_help_are_taken_in_order_and_all_put_back() -> None:
    rungs = [Note("one"), Note("two", "there is none"), Note("three")]
    ladder = made(*rungs)
    assert [ladder.climb() for _ in range(3)] == ["one on", "three on", None]
    assert ladder.names == ["one", "three"]
    assert ladder.summary() == " even with one on, with three on. No two: there is none."
    ladder.close()
    assert not any(rung.is_applied for rung in rungs)


def test_a_reason_may_pass() -> None:
    late = Note("late", "no states yet")
    ladder = made(late)
    assert ladder.climb() is None
    late.reason = None
    assert ladder.climb() == "late on"


def test_without_rungs() -> None:
    ladder = made()
    assert ladder.climb() is None
    assert ladder.climb_again() is None
    assert ladder.summary() == "."
    assert quiet(ladder) == 0


def test_the_latest_is_given_up_first() -> None:
    ladder = made(Note("one"), Note("two"))
    ladder.climb()
    ladder.climb()
    assert quiet(ladder) == STEPS_BEFORE_GROWTH
    assert ladder.names == ["one"]
    assert quiet(ladder) == STEPS_BEFORE_GROWTH
    assert ladder.names == []
    assert quiet(ladder) == 0


def test_a_failure_soon_after_takes_it_again_and_doubles_the_wait() -> None:
    ladder = made(Note("one"))
    ladder.climb()
    for spell in (100, 200, 400):
        assert quiet(ladder) == spell
        for _ in range(spell - 1):
            assert ladder.succeed() is None
        assert ladder.climb_again() == "one on"
    assert quiet(ladder) == 800


def test_a_failure_long_after_lowers_the_micro_batch_first() -> None:
    ladder = made(Note("one"))
    ladder.climb()
    assert quiet(ladder) == 100
    assert quiet(ladder) == 0  # the whole spell passed
    assert ladder.climb_again() is None
    ladder.climb()
    assert quiet(ladder) == 100


def test_any_failure_starts_the_wait_anew() -> None:
    ladder = made(Note("one"))
    ladder.climb()
    for _ in range(99):
        ladder.succeed()
    assert ladder.climb_again() is None  # a smaller micro-batch is the answer
    assert quiet(ladder) == 100


def test_a_resumed_run_takes_what_helps() -> None:
    ladder = made(Note("one"), Note("two", "not here"), Note("three"))
    assert ladder.climb_to(["one", "two", "of another version"]) == "one on"
    assert ladder.names == ["one"]
    assert ladder.climb() == "three on"
    assert made().climb_to(["one"]) is None


class OtherRank(Agreement):
    """Another rank that answers for itself."""

    def __init__(self, answer: bool) -> None:
        super().__init__(1)
        self.answer = answer

    def any_of(self, flags: object) -> list[bool]:
        return [self.answer or bool(flags[0])]  # type: ignore[index]


@pytest.mark.parametrize(("here", "there", "taken"), [(True, False, True), (False, True, True), (False, False, False)])
def test_a_rung_counts_as_taken_where_it_helps_any_rank(here: bool, there: bool, taken: bool) -> None:
    rung = Note("one", None if here else "not here")
    ladder = Ladder([rung], OtherRank(there))
    assert (ladder.climb() is not None) == taken
    assert rung.is_applied == here
    assert bool(ladder.names) == taken
