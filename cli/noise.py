"""What is logged reaches the terminal where it belongs.

`without_noise` drops messages of other packages that say nothing about the user's run; `progress_on_stdout` and
`bars_on_terminals_only` leave stderr empty where nothing is wrong.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_NOISE: dict[str, re.Pattern[str]] = {
    # torchao 0.18 tries the kernels of every GPU and Python that its wheel was built for.
    "torchao": re.compile(r"Failed to load \S+\.so: "),
    # It registers its enumerations in a way that torch 2.13 deprecates.
    "torch.utils._pytree": re.compile(r".* is an Enum subclass and is now natively supported"),
    # bitsandbytes 0.50 has a kernel of its own for what it misses here.
    "bitsandbytes.backends.cpu.ops": re.compile(r"Failed to load CPU gemm_4bit_forward from kernels-community"),
    # diffusers looks for tensors that torchao 0.18 has moved; no recipe has weights of that kind.
    "diffusers.quantizers.torchao.torchao_quantizer": re.compile(r"Unable to import `torchao` Tensor objects"),
    # With a traceback; it then raises an error, which is reworded with the line of the file.
    "datasets.packaged_modules.json.json": re.compile(r"Failed to load JSON from file "),
    # Of norms that are clipped on a mesh of two dimensions, the sum of which torch takes in two steps.
    "torch.distributed.tensor._redistribute": re.compile(r"While redistributing from "),
    # Which accelerator a run is on is said by Lightning.
    "DeepSpeed": re.compile(r"Setting (ds_)?accelerator to "),
    # Lightning 2.6 recommends a service of its makers, for logging and for checkpoints.
    "lightning.pytorch.utilities.rank_zero": re.compile(r"\W*Tip: For seamless cloud "),
}
"""Beginnings of such messages, by the logger that they come from."""


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return _NOISE[record.name].match(record.getMessage()) is None


@contextmanager
def without_noise() -> Iterator[None]:
    """Drop these messages, and no others; it has to begin before the packages are imported, as some speak then."""
    loggers = [logging.getLogger(name) for name in _NOISE]
    for logger in loggers:
        logger.addFilter(_is_worth_saying)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_worth_saying)


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
