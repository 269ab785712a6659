"""The states of all random generators, cheap enough to save in every step."""

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MT19937_BYTES = 625 * 4  # 624 words and the position


class RandomState:
    """The states of Python's, NumPy's and torch's generators, and of the accelerator's.

    Args:
        device: The device in use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = _python.state()
        self._numpy = _numpy.state()
        self._cpu = torch.get_rng_state()
        self._accelerator: Tensor | None = None
        if device.type != "cpu":
            self._accelerator = torch.get_device_module(device).get_rng_state()

    def restore(self) -> None:
        """Set all generators back."""
        import numpy

        random.setstate(self._python)
        numpy.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._cpu)
        if self._accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator)


class _Generator:
    """A global generator whose state is expensive to ask for, and which training rarely draws from.

    As long as its memory holds the same bytes as when the state was last asked for, that answer stands. Once it was
    seen to change, it is asked every time.

    Args:
        ask: Returns the state.
        peek: Returns the bytes the generator lives in, None where they can't be read.
    """

    def __init__(self, ask: Callable[[], Any], peek: Callable[[], object]) -> None:
        self._ask = ask
        self._peek = peek
        self._seen: object = None
        self._state: Any = None
        self._is_used = False

    def state(self) -> Any:
        """The generator's state."""
        now = None if self._is_used else self._peek()
        if now is None:
            return self._ask()
        if self._seen != now:
            self._is_used = self._seen is not None
            self._seen, self._state = now, self._ask()
        return self._state


def _ask_numpy() -> Any:
    import numpy

    return numpy.random.get_state(legacy=False)  # noqa: NPY002


def _peek_numpy() -> bytes | None:
    import numpy

    generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, numpy.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _peek_python() -> tuple[bytes, float | None] | None:
    if _python_address is None:
        return None
    return ctypes.string_at(_python_address, _MT19937_BYTES), random._inst.gauss_next  # type: ignore[attr-defined]


def _find_python_state() -> int | None:
    """Where CPython keeps the words of the global generator: behind the object's header, if a comparison proves it."""
    generator = getattr(random, "_inst", None)
    size = object.__basicsize__ + _MT19937_BYTES
    if sys.implementation.name != "cpython" or generator is None or type(generator).__basicsize__ < size:
        return None
    address = id(generator) + object.__basicsize__
    words = struct.unpack("=625I", ctypes.string_at(address, _MT19937_BYTES))
    return address if (*words[1:], words[0]) == random.getstate()[1] else None


_python_address = _find_python_state()
_python = _Generator(random.getstate, _peek_python)
_numpy = _Generator(_ask_numpy, _peek_numpy)
