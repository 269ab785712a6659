"""`guard_loggers`: what goes wrong in a logger is said once, and never ends a run that has begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.memory.wrapping import wrap_method

_METHODS = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")


def guard_loggers(loggers: Sequence[Logger]) -> Callable[[], None]:
    """Let the calls that a run makes to its loggers fail without an end of the run.

    Making a logger's experiment, before training, may still fail: then nothing is lost.
    """
    undo = []
    for logger in loggers:
        guard = partial(_guarded, logger, set())
        undo += [wrap_method(logger, name, guard) for name in _METHODS if callable(getattr(logger, name, None))]

    def remove() -> None:
        while undo:
            undo.pop()()

    return remove


def _guarded(logger: Logger, told: set[str], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return method(*args, **kwargs)
    except Exception as error:  # a tracker may raise anything
        if not told:
            told.add(type(error).__name__)
            rank_zero_warn(
                f"{type(logger).__name__} failed ({type(error).__name__}: {error}). Training goes on; figures that it "
                "can't take are lost to it. This is said once."
            )
    return None
