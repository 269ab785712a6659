"""What is logged reaches the terminal where it belongs.

`without_noise` drops warnings of other packages that say nothing about the user's run; `progress_on_stdout` and
`bars_on_terminals_only` leave stderr empty where nothing is wrong.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""Loggers that warn whenever their package is imported: of kernels for other GPUs and Pythons (torchao 0.18), of how
torchao registers its enumerations (torch 2.13), and of kernels that can be downloaded (bitsandbytes 0.50)."""


@contextmanager
def without_noise() -> Iterator[None]:
    """Let these loggers speak of errors only; it has to begin before the packages are imported."""
    levels = {logger: logger.level for logger in map(logging.getLogger, _NOISY)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


_NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"
"""Read by huggingface_hub as it shows a bar, and by transformers as it is imported, for bars of weights."""


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Leave the bars of downloads and of weights out of pipes and files, unless the user has decided about them."""
    if _NO_BARS in os.environ or sys.stderr.isatty():
        yield
        return
    os.environ[_NO_BARS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_NO_BARS, None)


_REPORTING = ("lightning.pytorch", "lightning.fabric")


def _is_wrong(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def _is_progress(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


@contextmanager
def progress_on_stdout() -> Iterator[None]:
    """Print what Lightning's loggers, and ours through them, say of a run's progress; warnings stay on stderr.

    Loggers that the user has given other handlers are left alone.
    """
    with ExitStack() as undone:
        for logger in map(logging.getLogger, _REPORTING):
            for handler in [one for one in logger.handlers if type(one) is logging.StreamHandler]:
                if handler.stream is not sys.stderr:
                    continue
                printing = logging.StreamHandler(sys.stdout)
                printing.setFormatter(handler.formatter)
                printing.addFilter(_is_progress)
                logger.addHandler(printing)
                undone.callback(logger.removeHandler, printing)
                handler.addFilter(_is_wrong)
                undone.callback(handler.removeFilter, _is_wrong)
        yield
