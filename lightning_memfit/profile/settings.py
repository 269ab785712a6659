"""`kept_settings`: settings of the process, of torch and of NumPy are as they were after a trial step."""

import decimal
import gc
import locale
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from lightning_memfit.memory.kind import CUDA

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""Reads a setting, and sets it."""


@contextmanager
def kept_settings() -> Iterator[None]:
    """Set back what a step sets of its process."""
    before = []
    for read, write in _settings():
        with suppress(RuntimeError):  # where old and new names of torch's settings are mixed, it refuses to read them
            before.append((read(), read, write))
    loggers = _loggers()
    try:
        yield
    finally:
        for value, read, write in before:
            if read() != value:
                write(value)
        for logger, attributes in loggers:
            if _attributes(logger) != attributes:
                level, logger.disabled, logger.propagate, handlers, filters = attributes
                logger.setLevel(level)
                logger.handlers[:], logger.filters[:] = handlers, filters


def _settings() -> Iterator[_Setting]:
    yield from _of_process()
    yield from _of_python()
    yield from _of_torch()
    yield np.geterr, lambda value: np.seterr(**value)
    yield np.get_printoptions, lambda value: np.set_printoptions(**value)


def _of_process() -> Iterator[_Setting]:
    yield lambda: dict(os.environ), _set_environment
    yield os.getcwd, os.chdir
    yield _umask, os.umask
    yield lambda: locale.setlocale(locale.LC_ALL), lambda value: locale.setlocale(locale.LC_ALL, value)
    if threading.current_thread() is threading.main_thread():
        yield _signal_handlers, _set_signal_handlers


def _umask() -> int:
    if sys.platform == "linux":  # else it can be read only by setting it, for all threads
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    before = os.umask(0)
    os.umask(before)
    return before


def _set_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    for name, content in value.items():
        if os.environ.get(name) != content:
            os.environ[name] = content


def _signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_signal_handlers(value: dict[int, Any]) -> None:
    for number, handler in value.items():
        if handler is not None and signal.getsignal(number) != handler:
            with suppress(OSError, ValueError):
                signal.signal(number, handler)


def _of_python() -> Iterator[_Setting]:
    for values in (sys.path, sys.argv, sys.path_hooks, warnings.filters):
        yield _entries_of(values)
    for name in ("excepthook", "displayhook", "unraisablehook", "stdin"):
        yield _attribute_of(sys, name)
    yield sys.getrecursionlimit, sys.setrecursionlimit
    yield gc.get_threshold, lambda value: gc.set_threshold(*value)
    yield gc.isenabled, lambda value: gc.enable() if value else gc.disable()
    yield decimal.getcontext().copy, lambda value: decimal.setcontext(value)
    yield lambda: logging.root.manager.disable, logging.disable
    yield logging.getLoggerClass, logging.setLoggerClass
    yield logging.getLogRecordFactory, logging.setLogRecordFactory


def _entries_of(values: Any) -> _Setting:
    def write(before: list[Any]) -> None:
        values[:] = before

    return lambda: list(values), write


def _attribute_of(owner: Any, name: str) -> _Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _of_torch() -> Iterator[_Setting]:
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield _attribute_of(torch.utils.deterministic, "fill_uninitialized_memory")
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    for kind in ("cpu", CUDA):
        yield _of_kind(torch.is_autocast_enabled, torch.set_autocast_enabled, kind)
        yield _of_kind(torch.get_autocast_dtype, torch.set_autocast_dtype, kind)
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        yield _attribute_of(torch.backends.cudnn, name)
    products = torch.backends.cuda.matmul
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        yield _attribute_of(products, name)
    attention = torch.backends.cuda
    yield attention.flash_sdp_enabled, attention.enable_flash_sdp
    yield attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp
    yield attention.math_sdp_enabled, attention.enable_math_sdp
    yield attention.cudnn_sdp_enabled, attention.enable_cudnn_sdp
    for namespace in (torch.nn.functional, torch.Tensor, torch.nn.Module):
        yield _functions_of(namespace)


def _of_kind(read: Callable[[str], Any], write: Callable[[str, Any], object], kind: str) -> _Setting:
    return lambda: read(kind), lambda value: write(kind, value)


def _functions_of(namespace: Any) -> _Setting:
    """What a step may have replaced by functions of its own; what torch adds by itself stays."""

    def write(before: dict[str, Any]) -> None:
        for name, value in before.items():
            if vars(namespace).get(name) is not value:
                setattr(namespace, name, value)

    return lambda: {name: value for name, value in vars(namespace).items() if callable(value)}, write


_Attributes = tuple[int, bool, bool, list[Any], list[Any]]


def _attributes(logger: logging.Logger) -> _Attributes:
    return logger.level, logger.disabled, logger.propagate, list(logger.handlers), list(logger.filters)


def _loggers() -> list[tuple[logging.Logger, _Attributes]]:
    named = [one for one in list(logging.root.manager.loggerDict.values()) if isinstance(one, logging.Logger)]
    return [(logger, _attributes(logger)) for logger in (logging.root, *named)]
