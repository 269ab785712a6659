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
        self._cpu = torch.default_generator.get_state()
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
    words beside it tell whether anything was drawn since the state was last asked for; if not, that answer stands.
    While it keeps the second of a pair of normal numbers, given out without moving, it is asked every time.

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
        self._is_hidden = False

    def state(self) -> Any:
        """The generator's state."""
        now = self._peek()
        if now is None or self._is_hidden or now != self._seen:
            self._seen, self._state = now, self._ask()
            self._is_hidden = self._keeps_normal(self._state)
        return self._state


def _ask_numpy() -> Any:
    return numpy.random.get_state(legacy=False)  # noqa: NPY002


class _NumpyWords:
    """The bytes to compare of NumPy's global generator, which the user may exchange."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._bytes: Any = None

    def __call__(self) -> bytes | None:
        generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._generator:
            self._generator, self._bytes = generator, None
            if isinstance(generator, numpy.random.MT19937):  # the position comes last
                self._bytes = _bytes_at(generator.ctypes.state_address + _MT19937_BYTES - _PEEKED_BYTES)
        return None if self._bytes is None else self._bytes.raw


def _peek_python() -> bytes | None:
    return None if _python_bytes is None else _python_bytes.raw


def _bytes_at(address: int) -> Any:
    return (ctypes.c_char * _PEEKED_BYTES).from_address(address)


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
_python_bytes = None if _python_address is None else _bytes_at(_python_address)
_python = _Generator(random.getstate, _peek_python, lambda state: state[2] is not None)
_numpy = _Generator(_ask_numpy, _NumpyWords(), lambda state: bool(state.get("has_gauss")))
