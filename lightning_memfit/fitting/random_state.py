"""The states of all random generators, cheap enough to save in every step."""

import ctypes
import random
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
        self._python = random.getstate()
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


class _NumpyGenerator:
    """NumPy's global generator. Asking for its state takes longer than the rest of a small step.

    Training rarely draws from it: as long as its memory (the public `ctypes.state_address`) holds the same bytes as
    when the state was last asked for, that answer stands. Once it was seen to change, it is asked every time.
    """

    def __init__(self) -> None:
        self._seen: bytes | None = None
        self._state: Any = None
        self._is_used = False

    def state(self) -> Any:
        """What `numpy.random.get_state` returns."""
        import numpy

        generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        if self._is_used or not isinstance(generator, numpy.random.MT19937):
            return numpy.random.get_state(legacy=False)  # noqa: NPY002
        now = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if self._seen != now:
            self._is_used = self._seen is not None
            self._seen, self._state = now, numpy.random.get_state(legacy=False)  # noqa: NPY002
        return self._state


_numpy = _NumpyGenerator()
