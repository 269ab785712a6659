"""Keep trial runs from disturbing the process: quiet loggers, a silent Trainer, a paused garbage collector."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SILENT_TRAINER: dict[str, Any] = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "use_distributed_sampler": False,
}
"""Options of a Trainer that runs a few trial steps and leaves nothing behind."""

LIGHTNING = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric")


@contextmanager
def loggers_at(level: int, *names: str) -> Iterator[None]:
    """Let loggers pass messages of a level and above only, and give them their own levels back."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, its_level in zip(loggers, before, strict=True):
            logger.setLevel(its_level)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector, while a trace or its imports run.

    Uses can be nested, and a collector that was off before stays off.

    A collection frees the tensors of cycles at a moment that depends on everything else the process has made, so that
    two traces of one step would differ. It also walks all of torch's and transformers' objects again and again: a
    quarter of the time that a cold estimate takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
