"""Keep loggers quiet for a while."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
