"""`kept_settings`: settings of the process, of torch and of NumPy are as they were after a trial step.

One that another thread has set meanwhile stays, as far as the names in its code tell. Lists such as `sys.path`, and
switches of common names, are always set back.
"""

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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_memfit.memory.kind import CUDA

IsChangedBy = Callable[[str], bool]
"""Whether code may set what has a name."""


@dataclass(frozen=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], object]
    names: tuple[str, ...] = ()
    """By which code sets it, if they say enough."""


@contextmanager
def kept_settings(
    others: IsChangedBy = lambda name: False, step: IsChangedBy = lambda name: True
) -> Iterator[list[str]]:
    """Set back what a step sets of its process.

    Args:
        others: Whether another thread may have set something meanwhile; asked at the end.
        step: Whether the step may have, too.

    Returns:
        A list that gets the names of what both may have set; it stays as it is.
    """
    shared: list[str] = []

    def is_others(names: tuple[str, ...]) -> bool:
        found = [name for name in names if others(name)]
        shared.extend(filter(step, found))
        return bool(found)

    before = []
    for setting in _settings():
        with suppress(RuntimeError):  # where old and new names of torch's settings are mixed, it refuses to read them
            before.append((setting.read(), setting))
    environment, loggers, modules = dict(os.environ), _loggers(), dict(sys.modules)
    try:
        yield shared
    finally:
        for value, setting in before:
            if setting.read() != value and not is_others(setting.names):
                setting.write(value)
        for name in {**environment, **os.environ}:
            if os.environ.get(name) != environment.get(name) and not is_others((name,)):
                _set_variable(name, environment.get(name))
        _put_back_modules(modules, step)
        for logger, attributes in (*loggers, *_new_loggers(loggers, step)):
            if _attributes(logger) != attributes:
                level, logger.disabled, logger.propagate, handlers, filters = attributes
                logger.setLevel(level)
                logger.handlers[:], logger.filters[:] = handlers, filters


def _put_back_modules(before: dict[str, Any], step: IsChangedBy) -> None:
    """Undo what a step did to `sys.modules` but for imports: those give a module the name that it has itself."""
    for name, module in list(sys.modules.items()):
        if before.get(name) is module or getattr(getattr(module, "__spec__", None), "name", None) == name:
            continue
        if step(name) and name in before:
            sys.modules[name] = before[name]
        elif step(name):
            del sys.modules[name]


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


def _settings() -> Iterator[_Setting]:
    yield from _of_process()
    yield from _of_python()
    yield from _of_torch()
    yield _Setting(np.geterr, lambda value: np.seterr(**value), ("seterr",))
    yield _Setting(np.get_printoptions, lambda value: np.set_printoptions(**value), ("set_printoptions",))


def _by_function(read: Callable[[], Any], write: Callable[[Any], object]) -> _Setting:
    return _Setting(read, write, (write.__name__,))


def _of_process() -> Iterator[_Setting]:
    yield _by_function(os.getcwd, os.chdir)
    yield _by_function(_umask, os.umask)
    set_locale = locale.setlocale
    yield _Setting(lambda: set_locale(locale.LC_ALL), lambda value: set_locale(locale.LC_ALL, value), ("setlocale",))
    if threading.current_thread() is threading.main_thread():  # others can't set them
        yield _Setting(_signal_handlers, _set_signal_handlers)


def _umask() -> int:
    if sys.platform == "linux":  # else it can be read only by setting it, for all threads
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    before = os.umask(0)
    os.umask(before)
    return before


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
    yield _by_function(sys.getrecursionlimit, sys.setrecursionlimit)
    yield _Setting(gc.get_threshold, lambda value: gc.set_threshold(*value), ("set_threshold",))
    yield _Setting(gc.isenabled, lambda value: gc.enable() if value else gc.disable())
    yield _Setting(decimal.getcontext().copy, lambda value: decimal.setcontext(value))  # each thread has its own
    yield _Setting(lambda: logging.root.manager.disable, logging.disable)
    yield _attribute_of(threading.current_thread(), "name", ())  # each thread has its own
    yield _by_function(logging.getLoggerClass, logging.setLoggerClass)
    yield _by_function(logging.getLogRecordFactory, logging.setLogRecordFactory)


def _entries_of(values: Any) -> _Setting:
    def write(before: list[Any]) -> None:
        values[:] = before

    return _Setting(lambda: list(values), write)


def _attribute_of(owner: Any, name: str, names: tuple[str, ...] | None = None) -> _Setting:
    names = (name,) if names is None else names
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), names)


def _parts(backend: Any) -> Iterator[Any]:
    """What of a backend has a precision for float32 of its own."""
    yield from (part for name in ("matmul", "conv", "rnn") if (part := getattr(backend, name, None)) is not None)


def switches() -> list[object]:
    """Values of all settings of torch that decide which operators and kernels a step runs, for keys of its traces."""
    found: list[object] = [str(torch.get_default_device())]
    for setting in _switches():
        try:
            found.append(repr(setting.read()))
        except RuntimeError as error:  # where old and new names of torch's settings are mixed, it refuses to read them
            found.append(type(error).__name__)
    return found


def _of_torch() -> Iterator[_Setting]:
    yield from _switches()
    yield _by_function(torch.get_num_threads, torch.set_num_threads)  # kernels are learned on one
    for namespace in (torch.nn.functional, torch.Tensor, torch.nn.Module):
        yield _functions_of(namespace)


def _switches() -> Iterator[_Setting]:
    yield _by_function(torch.get_default_dtype, torch.set_default_dtype)
    yield _Setting(torch.is_grad_enabled, torch.set_grad_enabled)  # each thread has its own
    yield _by_function(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
    yield _by_function(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    yield _by_function(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode)
    yield _attribute_of(torch.utils.deterministic, "fill_uninitialized_memory")
    yield _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    for kind in ("cpu", CUDA):
        yield _of_kind(torch.is_autocast_enabled, torch.set_autocast_enabled, kind)
        yield _of_kind(torch.get_autocast_dtype, torch.set_autocast_dtype, kind)
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        yield _attribute_of(torch.backends.cudnn, name)
    backends: Any = torch.backends
    for backend in (backends.cuda.matmul, *(part for one in (backends.cudnn, backends.mkldnn) for part in _parts(one))):
        yield _attribute_of(backend, "fp32_precision")
    products = torch.backends.cuda.matmul
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        yield _attribute_of(products, name)
    attention = torch.backends.cuda
    yield _by_function(attention.flash_sdp_enabled, attention.enable_flash_sdp)
    yield _by_function(attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp)
    yield _by_function(attention.math_sdp_enabled, attention.enable_math_sdp)
    yield _by_function(attention.cudnn_sdp_enabled, attention.enable_cudnn_sdp)
    if hasattr(attention, "allow_fp16_bf16_reduction_math_sdp"):  # torch 2.5
        yield _by_function(attention.fp16_bf16_reduction_math_sdp_allowed, attention.allow_fp16_bf16_reduction_math_sdp)
    if hasattr(torch._C, "_set_sdp_priority_order"):  # torch 2.6
        yield _Setting(torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, ("sdpa_kernel",))
    yield _attribute_of(torch.backends.mkldnn, "enabled")
    for name in ("enabled", "strategy"):
        yield _attribute_of(torch.backends.opt_einsum, name)


def _of_kind(read: Callable[[str], Any], write: Callable[[str, Any], object], kind: str) -> _Setting:
    return _Setting(lambda: read(kind), lambda value: write(kind, value))  # each thread has its own


def _functions_of(namespace: Any) -> _Setting:
    """What a step may have replaced by functions of its own; what torch adds by itself stays."""

    def write(before: dict[str, Any]) -> None:
        for name, value in before.items():
            if vars(namespace).get(name) is not value:
                setattr(namespace, name, value)

    return _Setting(lambda: {name: value for name, value in vars(namespace).items() if callable(value)}, write)


_Attributes = tuple[int, bool, bool, list[Any], list[Any]]


def _attributes(logger: logging.Logger) -> _Attributes:
    return logger.level, logger.disabled, logger.propagate, list(logger.handlers), list(logger.filters)


def _loggers() -> list[tuple[logging.Logger, _Attributes]]:
    named = [one for one in list(logging.root.manager.loggerDict.values()) if isinstance(one, logging.Logger)]
    return [(logger, _attributes(logger)) for logger in (logging.root, *named)]


_Loggers = list[tuple[logging.Logger, _Attributes]]


def _new_loggers(before: _Loggers, step: IsChangedBy) -> Iterator[tuple[logging.Logger, _Attributes]]:
    """Loggers that a step has made by their names, and what new ones are like."""
    known = {id(logger) for logger, _ in before}
    for logger, _ in _loggers():
        if id(logger) not in known and step(logger.name):
            yield logger, (logging.NOTSET, False, True, [], [])
