"""The states of all random generators, cheap enough to save in every step."""

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

_MT19937_BYTES = 625 * 4  # 624 words and the position
_PEEKED_BYTES = 16  # the position and the three words beside it


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
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._cpu)
        if self._accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator)


class _Generator:
    """A global generator whose state is expensive to ask for, and which training rarely draws from.

    A Mersenne twister moves its position with every draw and makes all words anew each 624. So the position and a few
    words beside it tell whether anything was drawn since the state was last asked for; if not, that answer stands. Once
    the generator was seen to change, it is asked every time, and also when it keeps the second of a pair of normal
    numbers, which it gives out without moving.

    Args:
        ask: Returns the state.
        peek: Returns the bytes to compare, None where they can't be read.
        keeps_normal: Whether a state has the second of a pair of normal numbers in it.
    """

    def __init__(
        self, ask: Callable[[], Any], peek: Callable[[], bytes | None], keeps_normal: Callable[[Any], bool]
    ) -> None:
        self._ask = ask
        self._peek = peek
        self._keeps_normal = keeps_normal
        self._seen: bytes | None = None
        self._state: Any = None
        self._is_used = False

    def state(self) -> Any:
        """The generator's state."""
        if self._is_used:
            return self._ask()
        now = self._peek()
        if now is None or now != self._seen:
            self._state = self._ask()
            self._is_used = now is None or self._seen is not None or self._keeps_normal(self._state)
            self._seen = now
        return self._state


def _ask_numpy() -> Any:
    return numpy.random.get_state(legacy=False)  # noqa: NPY002


def _peek_numpy() -> bytes | None:
    generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, numpy.random.MT19937):
        return None
    end = generator.ctypes.state_address + _MT19937_BYTES  # the position comes last
    return ctypes.string_at(end - _PEEKED_BYTES, _PEEKED_BYTES)


def _peek_python() -> bytes | None:
    return None if _python_address is None else ctypes.string_at(_python_address, _PEEKED_BYTES)


def _find_python_state() -> int | None:
    """Where CPython keeps the position and words of the global generator: behind the object's header, if proven so."""
    generator = getattr(random, "_inst", None)
    size = object.__basicsize__ + _MT19937_BYTES
    if sys.implementation.name != "cpython" or generator is None or type(generator).__basicsize__ < size:
        return None
    address = id(generator) + object.__basicsize__
    words = struct.unpack("=625I", ctypes.string_at(address, _MT19937_BYTES))
    return address if (*words[1:], words[0]) == random.getstate()[1] else None


_python_address = _find_python_state()
_python = _Generator(random.getstate, _peek_python, lambda state: state[2] is not None)
_numpy = _Generator(_ask_numpy, _peek_numpy, lambda state: bool(state.get("has_gauss")))
