"""Keep loggers quiet for a while."""

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
"""Options of a Trainer that trains a few steps for what they tell, and leaves nothing behind."""

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


# Hold Python's cyclic garbage collector back while a trace or its imports run.


@contextmanager
def collector_paused() -> Iterator[None]:
    """Leave reference cycles alone until the end; nested uses and a collector that was off before are respected.

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
