"""`without_noise`: messages of other packages that say nothing about the user's run don't reach the terminal."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

_NOISE: dict[str, re.Pattern[str]] = {
    # torchao tries the kernels of every GPU and Python that its wheel was built for.
    "torchao": re.compile(r"Failed to load \S+\.so"),
    # torchao 0.18 registers its enumerations in a way that torch 2.13 deprecates.
    "torch.utils._pytree": re.compile(r".*is an Enum subclass and is now natively supported"),
    # An optional kernel, for which bitsandbytes has another of its own.
    "bitsandbytes.backends.cpu.ops": re.compile(r"Failed to load CPU gemm_4bit_forward"),
    "lightning.pytorch.utilities.rank_zero": re.compile(r"\W*Tip: For seamless"),
}
"""Beginnings of such messages, by the logger that they come from."""


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return _NOISE[record.name].match(record.getMessage()) is None


@contextmanager
def without_noise() -> Iterator[None]:
    """Drop these messages, and no others."""
    loggers = [logging.getLogger(name) for name in _NOISE]
    for logger in loggers:
        logger.addFilter(_is_worth_saying)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_worth_saying)
