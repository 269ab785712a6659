"""Recover from out-of-memory errors in hooks after backward and in clipping.

`retry` repeats one action from a known state, or ends in a `MemoryExhausted` that says where memory ran out, what was
tried and what helps. Elsewhere (moving batches, schedulers, saving, other hooks) nobody can tell what an error left
half done: `explain_where` says where memory ran out.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.oom import is_out_of_memory, release

T = TypeVar("T")

NUM_REPEATS = 2
WITH_SEVERAL_DEVICES = "With several devices it is not repeated, as all of them would have to do so together."


def _no_obstacle() -> str | None:
    return None


class MemoryExhausted(torch.OutOfMemoryError):
    """Memory ran out, and everything that can be tried has been; nobody should try again."""


def retry(
    action: Callable[[], T],
    place: str | Callable[[], str],
    remedy: str,
    undo: Callable[[], None] = lambda: None,
    prepare: Callable[[], object] = lambda: None,
    obstacle: Callable[[], str | None] = _no_obstacle,
) -> T:
    """Call a function, and call it again after an out-of-memory error.

    Args:
        action: The function.
        place: Where it runs, for messages; a function is asked after an error.
        remedy: What the user can do if nothing helps.
        undo: Puts back what `action` may have changed; called after every out-of-memory error, the last included.
        prepare: Called before every repetition, with memory released.
        obstacle: Asked after an error, before `undo`; returns why the action can't be repeated, else None.

    Raises:
        MemoryExhausted: If memory runs out each time, or there is an obstacle.
    """
    failures = 0
    while True:
        try:
            return action()
        except Exception as error:
            failure = error
        if isinstance(failure, MemoryExhausted) or not is_out_of_memory(failure):
            raise failure
        failures += 1
        where = place if isinstance(place, str) else place()
        message = str(failure).split("\n")[0]
        hindrance = obstacle()
        release(failure)
        undo()
        if hindrance is not None:
            raise MemoryExhausted(f"Memory ran out in {where}. {hindrance} {remedy} {message}") from failure
        if failures > NUM_REPEATS:
            raise MemoryExhausted(
                f"Memory ran out in {where} {failures} times in a row, although cached memory was released before "
                f"each repetition. Weights and optimizer states are those before it. {remedy} {message}"
            ) from failure
        rank_zero_warn(f"Memory ran out in {where}; it is repeated with cached memory released. {message}")
        del failure
        prepare()


def explain_where(error: BaseException, num_devices: int) -> None:
    """Add to an out-of-memory error that nothing could recover from where it happened, and what helps.

    Args:
        error: What ended the run; other errors, and those that explain themselves, stay as they are.
        num_devices: Number of devices of the run.
    """
    if not is_out_of_memory(error) or any(isinstance(one, MemoryExhausted) for one in error_chain(error)):
        return
    hook = _hook_in(error)
    where = f"`{hook}`" if hook else "Lightning's loop, outside of hooks"
    what = (
        "repeats forward, backward, clipping and optimizer steps, but not this, as nobody can tell what it had changed"
        if num_devices == 1
        else "repeats forward, backward and optimizer steps, but not this, which all devices would have to do together"
    )
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
