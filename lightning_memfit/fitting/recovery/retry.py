"""How steps end, and what ranks tell each other of it."""

import time
from collections.abc import Sequence
from enum import IntEnum

import torch

from lightning_memfit.memory.oom import is_out_of_memory
from lightning_memfit.reliability.consensus import At, PeerFailed, RankConsensus

_LET_OTHERS_SPEAK = 2.0  # seconds


class MemoryExhausted(torch.OutOfMemoryError):
    """Memory ran out, and everything that can be tried has been; nobody should try again."""


class ShortElsewhere(PeerFailed):
    """Another rank has run out of memory, and has told all."""


class Outcome(IntEnum):
    """How what ranks did together has gone on one of them; the last one is of comparisons that showed nothing."""

    OK = 0
    OUT_OF_MEMORY = 1
    FAILED = 2
    UNSEEN = 3


def outcome_of(error: Exception | None) -> Outcome:
    """Return the outcome that an error stands for, or none."""
    if error is None:
        return Outcome.OK
    return Outcome.OUT_OF_MEMORY if is_out_of_memory(error) else Outcome.FAILED


def tell(
    ranks: RankConsensus, mine: Outcome, error: Exception | None, where: str, *numbers: float, at: At = At.ELSEWHERE
) -> list[Sequence[float]]:
    """Tell all ranks how this one's part has ended, and end all of them if one has failed.

    Args:
        ranks: The ranks.
        mine: The outcome of this one.
        error: What it ended in.
        where: What was done, for messages.
        numbers: What else is exchanged.
        at: The place of the run.

    Returns:
        The outcome of every rank with its numbers, in the order of ranks.

    Raises:
        Exception: This rank's own error, if it has failed.
        PeerFailed: On the other ranks.
    """
    told = ranks.exchange(mine, *numbers, at=at)
    outcomes = [theirs for theirs, *_ in told]
    if Outcome.FAILED not in outcomes:
        return told
    rank = outcomes.index(Outcome.FAILED)
    said = ranks.from_rank(rank, f"{type(error).__name__}: {error}")
    if error is not None and mine == Outcome.FAILED:
        raise error
    time.sleep(_LET_OTHERS_SPEAK)  # who is first to stop is often the only one that is heard
    raise PeerFailed(f"Rank {rank} failed {where}: {said}\nThis rank stops, too.")
