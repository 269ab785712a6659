"""`guard_loggers`: what goes wrong in a logger is said once, and never ends a run that has begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.memory.wrapping import wrap_method

_METHODS = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")


def guard_loggers(loggers: Sequence[Logger]) -> Callable[[], None]:
    """Let the calls that a run makes to its loggers fail without an end of the run.

    A `CSVLogger` whose folder has vanished makes it again, and goes on writing what it has; rows that were in the old
    folder are gone with it. Making a logger's experiment, before training, may still fail: then nothing is lost.

    Args:
        loggers: Those of a Trainer.

    Returns:
        A function that takes the guards off.
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
        if isinstance(error, FileNotFoundError) and isinstance(logger, CSVLogger):
            return _in_a_new_folder(logger)
    return None


def _in_a_new_folder(logger: CSVLogger) -> None:
    """Write the rows that a logger still has into a folder made anew."""
    try:
        Path(logger.log_dir).mkdir(parents=True, exist_ok=True)
        logger.experiment.save()
    except OSError:
        return  # said already; the rows stay in memory until the next time
