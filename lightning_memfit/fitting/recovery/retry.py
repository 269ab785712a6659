"""Errors of memory that nothing recovers from: where it ran out, and what helps.

In hooks, clipping, schedulers and saving, and while batches are moved, nobody can tell what an error left half done.
"""

import traceback

import torch

from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.oom import is_out_of_memory


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
