"""How steps end: what ranks tell each other of it, and errors of memory that nothing recovers from.

In hooks, clipping, schedulers and saving, and while batches are moved, nobody can tell what an error left half done.
"""

import time
import traceback
from collections.abc import Sequence
from enum import IntEnum

import torch

from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.oom import is_out_of_memory
from lightning_memfit.reliability.consensus import PeerFailed, RankConsensus

_LET_OTHERS_SPEAK = 2.0  # seconds


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


def raise_failure(
    ranks: RankConsensus, told: Sequence[float], mine: Outcome, error: Exception | None, where: str
) -> None:
    """End all ranks if one has failed for another reason than memory.

    Args:
        ranks: The ranks.
        told: The outcomes of all of them.
        mine: That of this one.
        error: What it ended in.
        where: What was done, for messages.

    Raises:
        Exception: This rank's own error, if it has failed.
        PeerFailed: On the other ranks.
    """
    if Outcome.FAILED not in told:
        return
    rank = list(told).index(Outcome.FAILED)
    said = ranks.from_rank(rank, f"{type(error).__name__}: {error}")
    if error is not None and mine == Outcome.FAILED:
        raise error
    time.sleep(_LET_OTHERS_SPEAK)  # who is first to stop is often the only one that is heard
    raise PeerFailed(f"Rank {rank} failed {where}: {said}\nThis rank stops, too.")


class MemoryExhausted(torch.OutOfMemoryError):
    """Memory ran out, and everything that can be tried has been; nobody should try again."""


def explain_where(error: BaseException) -> None:
    """Add to an out-of-memory error that nothing could recover from where it happened, and what helps.

    Args:
        error: What ended the run; other errors, and those that explain themselves, stay as they are.
    """
    if not is_out_of_memory(error) or any(isinstance(one, MemoryExhausted) for one in error_chain(error)):
        return
    hook = _hook_in(error)
    where = f"`{hook}`" if hook else "Lightning's loop, outside of hooks"
    what = (
        "repeats forward, backward and the first optimizer step, but not this, as nobody can tell what it had changed"
    )
    if hook == "optimizer_step":
        what += ". Some weights may be updated and some not: resume from the last checkpoint"
    text = (
        f"Memory ran out in {where}. `MicroBatching` {what}. Let it use less memory (`.cpu()`, smaller pieces, "
        "`torch.no_grad()`) or leave more: `MicroBatching(limit_bytes=...)`."
    )
    if isinstance(error, OSError):  # which prints this, not its arguments
        error.strerror = f"{error.strerror}\n{text}"
    error.args = (f"{error}\n{text}", *error.args[1:])


def _hook_in(error: BaseException) -> str | None:
    """Name of the innermost hook that Lightning was calling; None if it was calling none."""
    names = [
        frame.f_locals.get("hook_name")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name.startswith("_call_")
    ]
    return next((name for name in reversed(names) if isinstance(name, str)), None)
