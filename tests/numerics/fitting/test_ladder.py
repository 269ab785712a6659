"""When rungs are taken and given up, and what each does to a module."""

from typing import get_args

import pytest
import torch
from torch import nn

from lightning_memfit.checkpointing.apply import CheckpointedForward, apply_checkpointing
from lightning_memfit.fitting.recovery import ladder as ladder_module
from lightning_memfit.fitting.recovery.ladder import (
    InputsOnHost,
    Ladder,
    LastResort,
    Recomputation,
    Rung,
    StatesOnHost,
    rungs_up_to,
)
from lightning_memfit.fitting.size.sizes import STEPS_BEFORE_GROWTH
from lightning_memfit.reliability.consensus import RankConsensus


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


def names(ladder: Ladder) -> list[str]:
    return [rung.name for rung in ladder._taken]


def made(*rungs: Rung) -> Ladder:
    return Ladder(rungs, RankConsensus(1))


def quiet(ladder: Ladder) -> int:
    """Steps without failure until a rung is given up, 0 if none is."""
    return next((step for step in range(1, 20_000) if ladder.succeed()), 0)


def test_rungs_that_help_are_taken_in_order_and_all_put_back() -> None:
    rungs = [Note("one"), Note("two", "there is none"), Note("three")]
    ladder = made(*rungs)
    assert [ladder.climb() for _ in range(3)] == ["one on", "three on", None]
    assert names(ladder) == ["one", "three"]
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
    assert names(ladder) == ["one"]
    assert quiet(ladder) == STEPS_BEFORE_GROWTH
    assert names(ladder) == []
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


class OtherRank(RankConsensus):
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
    assert bool(names(ladder)) == taken


# --- rungs ------------------------------------------------------------------------------------------------------------


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def forwards(module: nn.Module) -> list[object]:
    return [vars(block).get("forward") for block in module]


def stepped() -> torch.optim.Optimizer:
    linear = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("last_resort", "count"), [("none", 0), ("recompute", 1), ("offload", 3)])
def test_how_far_the_ladder_goes(last_resort: LastResort, count: int) -> None:
    assert last_resort in get_args(LastResort)
    assert len(rungs_up_to(last_resort, blocks(), stepped(), True, 1)) == count


def test_recomputation_keeps_nothing_and_gives_back_what_was_kept() -> None:
    module = blocks()
    apply_checkpointing(list(module)[:2], ["full", "keep_matmul"])
    before = forwards(module)
    rung = Recomputation(module)
    assert rung.refusal() is None
    rung.apply()
    assert rung.description.startswith("the activations of 3 more blocks")
    assert [forward.choice for forward in forwards(module)] == ["full"] * 4  # type: ignore[attr-defined]
    assert rung.refusal() == "there is no repeated block that keeps activations"
    rung.remove()
    rung.remove()
    assert forwards(module) == before
    assert [forward.choice for forward in before[:2]] == ["full", "keep_matmul"]  # type: ignore[attr-defined]


def test_compiled_and_offloaded_blocks_stay_as_they_are() -> None:
    module = blocks()
    apply_checkpointing([module[0]], ["offload"])
    for block in list(module)[1:]:
        block._compiled_call_impl = block.forward  # what `block.compile()` sets
    assert Recomputation(module).refusal() == "there is no repeated block that keeps activations"
    assert InputsOnHost(module, True).refusal() == "no block is recomputed from inputs on the device"


def test_inputs_of_blocks_that_the_user_has_recomputed_leave_too() -> None:
    module = blocks()
    assert InputsOnHost(module, True).refusal() == "no block is recomputed from inputs on the device"
    apply_checkpointing(list(module), ["full"] * 4)
    rung = InputsOnHost(module, True)
    assert rung.refusal() is None
    rung.apply()
    assert rung.description == "the inputs of 4 recomputed blocks in host memory"
    pools = {id(forward.inputs_on_host) for forward in forwards(module) if isinstance(forward, CheckpointedForward)}
    assert len(pools) == 1
    assert rung.refusal() is not None
    rung.remove()
    assert all(forward.inputs_on_host is None for forward in forwards(module))  # type: ignore[attr-defined]


def test_without_a_host_memory_of_its_own_nothing_leaves() -> None:
    module = blocks()
    apply_checkpointing(list(module), ["full"] * 4)
    for rung in (InputsOnHost(module, False), StatesOnHost(stepped(), False, 1)):
        assert rung.refusal() == "host memory is the device's own, or none that this can use"


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states of 256 KiB; a tenth of what is free is left alone."""

    class Host:
        available_bytes = 3 << 18

    monkeypatch.setattr(ladder_module, "probe_host", Host)
    assert StatesOnHost(stepped(), True, 1).refusal() is None
    refusal = StatesOnHost(stepped(), True, 2).refusal()
    assert refusal == "they take 512.00 KiB, and 345.60 KiB of host memory are free for them"
