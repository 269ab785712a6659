"""When recomputation is started, and what it does to a module."""

import pytest
from torch import nn

from lightning_memfit.checkpointing.apply import apply_checkpointing
from lightning_memfit.fitting.recovery.shortage import Recomputation
from lightning_memfit.reliability.consensus import RankConsensus

DONE = "the activations of 4 more blocks recomputed in backward"


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def forwards(module: nn.Module) -> list[object]:
    return [vars(block).get("forward") for block in module]


def made(module: nn.Module | None = None, is_allowed: bool = True) -> Recomputation:
    return Recomputation(blocks() if module is None else module, is_allowed, RankConsensus(1))


def test_it_is_done_once_and_put_back() -> None:
    module = blocks()
    recomputation = made(module)
    assert recomputation.start() == DONE
    assert recomputation.start() is None
    assert recomputation.summary() == f" even with {DONE}."
    recomputation.close()
    assert forwards(module) == [None] * 4


class OtherRank(RankConsensus):
    """Another rank that answers for itself."""

    def __init__(self, answer: bool) -> None:
        super().__init__(1)
        self.answer = answer

    def any_of(self, flags: object) -> list[bool]:
        return [self.answer or bool(flags[0])]  # type: ignore[index]


@pytest.mark.parametrize(
    ("here", "there", "started"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_it_is_started_where_it_helps_any_rank(here: bool, there: bool, started: bool) -> None:
    module = blocks() if here else nn.Linear(4, 4)
    assert (Recomputation(module, True, OtherRank(there)).start() is not None) == started


def test_it_keeps_nothing_and_gives_back_what_was_kept() -> None:
    module = blocks()
    apply_checkpointing(list(module)[:2], ["full", "keep_matmul"])
    before = forwards(module)
    recomputation = made(module)
    assert str(recomputation.start()).startswith("the activations of 3 more blocks")
    assert [forward.choice for forward in forwards(module)] == ["full"] * 4  # type: ignore[attr-defined]
    recomputation.close()
    recomputation.close()
    assert forwards(module) == before
    assert [forward.choice for forward in before[:2]] == ["full", "keep_matmul"]  # type: ignore[attr-defined]


def test_compiled_and_offloaded_blocks_stay_as_they_are() -> None:
    module = blocks()
    apply_checkpointing([module[0]], ["offload"])
    for block in list(module)[1:]:
        block._compiled_call_impl = block.forward  # what `block.compile()` sets
    assert made(module).start() is None
