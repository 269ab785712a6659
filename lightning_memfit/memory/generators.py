"""Save and put back the states of random generators: in checkpoints, and cheaply enough for every call of a block.

To ask Python's and NumPy's for their states takes 30 and 130 us. A Mersenne twister moves its position with every draw
and renews its words every 624. So the position, a few words next to it, and the second of a pair of normal numbers,
where one is kept, tell whether anything has happened since a state was last read; if not, that state is still valid.
They are read from where the generators keep them in memory, as far as a check proves where that is.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy
import torch

from lightning_memfit.memory.kind import DeviceKind

_MT19937_BYTES = 625 * 4  # 624 words and the position
_PEEKED_BYTES = 16  # the position and the three words next to it
_TORCH_HEAD_BYTES = 256  # of the C++ object; its state begins within them
_TORCH_PEEKED_BYTES = 32  # the seed, the position in three fields, and the three words next to it
_TORCH_STATE_BYTES = 2520  # seed, position and words, as the C++ object has them
_TORCH_NORMALS_BYTES = 17  # a float and a double behind them, each with a flag
_TORCH_NORMALS = 5016  # where a state has them
_NORMAL = 0.638094

Peek = Callable[[], Any]
"""Returns what changes with a generator's state, None where that can't be read."""


class HostGenerator:
    """A global generator of random numbers.

    Args:
        ask: Returns its state.
        put: Sets its state.
        peek: Returns what tells a state from others.
    """

    def __init__(self, ask: Callable[[], Any], put: Callable[[Any], None], peek: Peek) -> None:
        self._ask = ask
        self._put = put
        self._peek = peek
        self._seen: Any = None
        self._state: Any = None

    def state(self) -> Any:
        """Its state, which is not to be changed: the same object as long as nothing was drawn."""
        now = self._peek()
        if now is None or now != self._seen:
            self._seen, self._state = now, self._ask()
        return self._state

    def restore(self, state: Any) -> None:
        """Set it to a state that it had."""
        if self.state() is not state:
            self._put(state)
            self._seen, self._state = self._peek(), state


class _Peek:
    """Reads a global generator, which the user may replace.

    Args:
        current: Returns it.
        find: Returns bytes in its memory that change with its state; None if no check proves where they are.
    """

    def __init__(self, current: Callable[[], Any], find: Callable[[Any], tuple[Any, ...] | None]) -> None:
        self._current = current
        self._find = find
        self._generator: Any = None
        self._parts: tuple[Any, ...] | None = None

    def __call__(self) -> bytes | None:
        generator = self._current()
        if generator is not self._generator:
            self._generator, self._parts = generator, self._find(generator)
        return None if self._parts is None else b"".join([part.raw for part in self._parts])


def _bytes_at(address: int, size: int = _PEEKED_BYTES) -> Any:
    return (ctypes.c_char * size).from_address(address)


# --- Python -----------------------------------------------------------------------------------------------------------


def _peek_python() -> Any:
    return None if _python_bytes is None else (_python_bytes.raw, random._inst.gauss_next)  # type: ignore[attr-defined]


def _find_python_state() -> int | None:
    """Return the address of CPython's position and words, after the object's header if a check proves it; or None."""
    generator = getattr(random, "_inst", None)
    size = object.__basicsize__ + _MT19937_BYTES
    if sys.implementation.name != "cpython" or generator is None or type(generator).__basicsize__ < size:
        return None
    if not hasattr(generator, "gauss_next"):
        return None
    address = id(generator) + object.__basicsize__
    words = struct.unpack("=625I", ctypes.string_at(address, _MT19937_BYTES))
    return address if (*words[1:], words[0]) == random.getstate()[1] else None


# --- NumPy ------------------------------------------------------------------------------------------------------------


def _ask_numpy() -> Any:
    return numpy.random.get_state(legacy=False)  # noqa: NPY002


def _put_numpy(state: Any) -> None:
    numpy.random.set_state(state)  # noqa: NPY002


def _find_numpy_state(generator: Any) -> tuple[Any, ...] | None:
    """Bytes of NumPy's position and words, and of the normal number that its `RandomState` keeps; None if not found."""
    place = _find_numpy_normal()
    if not isinstance(generator, numpy.random.MT19937) or place is None:
        return None
    of_position = generator.ctypes.state_address + _MT19937_BYTES - _PEEKED_BYTES  # which comes last
    return _bytes_at(of_position), _bytes_at(id(_numpy_state_of()) + place)


def _numpy_state_of() -> Any:
    """NumPy's global `RandomState`."""
    return getattr(numpy.random.get_state, "__self__", None)


@lru_cache(maxsize=1)
def _find_numpy_normal() -> int | None:
    """Where a `RandomState` keeps a flag and the second of a pair of normal numbers, if a check proves it; or None."""
    if type(_numpy_state_of()) is not numpy.random.RandomState:
        return None
    probe = numpy.random.RandomState(0)
    state = probe.get_state(legacy=False)
    found = []
    for flag, normal in ((1, _NORMAL), (0, 0.0), (1, -_NORMAL)):
        probe.set_state(state | {"has_gauss": flag, "gauss": normal})
        found.append(ctypes.string_at(id(probe), numpy.random.RandomState.__basicsize__))
    kept = struct.pack("=d", _NORMAL)
    places = [place for place in range(8, len(found[0]) - 7, 8) if found[0][place : place + 8] == kept]
    for place in places:
        flags = [struct.unpack_from("=i", memory, place - 8)[0] for memory in found]
        if flags == [1, 0, 1] and found[2][place : place + 8] == struct.pack("=d", -_NORMAL):
            return place - 8
    return None


# --- torch ------------------------------------------------------------------------------------------------------------


def _ask_torch() -> bytes:
    """Return the state as bytes: a tensor would count on a simulated device, in steps that draw and only there."""
    return _bytes_of(torch.default_generator)


def _put_torch(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _bytes_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _find_torch_state(generator: torch.Generator) -> int | None:
    """Return the address of a generator's seed, position and words, if a check against its state proves it; or None.

    They lie behind the head of the C++ object, in which they are looked for word by word.
    """
    try:
        address: int = generator._cdata  # type: ignore[attr-defined]
        seed, left, is_seeded, position, *words = struct.unpack_from("=QiiQ624Q", _bytes_of(generator))
    except (AttributeError, TypeError, RuntimeError, struct.error):
        return None
    head = struct.pack("=Qi?", seed, left, is_seeded)
    rest = struct.pack("=625I", position, *words)  # from byte 16 on, after padding
    for start in range(address, address + _TORCH_HEAD_BYTES, 8):
        if ctypes.string_at(start, len(head)) == head and ctypes.string_at(start + 16, len(rest)) == rest:
            return start
    return None


def _keeps_torch_normals_behind(start: int, generator: torch.Generator) -> bool:
    """Whether a private generator shows the normal numbers of its state, a float and a double, behind its words."""
    for are_kept in (True, False):
        state = bytearray(_bytes_of(generator))
        struct.pack_into("=2d8xixxxxf?", state, _TORCH_NORMALS, _NORMAL, _NORMAL, are_kept, _NORMAL, are_kept)
        generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
        single, has_single, double, has_double = struct.unpack(
            "=f?xxxd?", ctypes.string_at(start + _TORCH_STATE_BYTES, _TORCH_NORMALS_BYTES)
        )
        if (has_single, has_double) != (are_kept, are_kept):
            return False
        if are_kept and (single, double) != (*struct.unpack("=f", struct.pack("=f", _NORMAL)), _NORMAL):
            return False
    return True


def _find_torch_bytes(generator: torch.Generator) -> tuple[Any, ...] | None:
    """Bytes of torch's seed, position and words, and of the normal numbers behind them; None if not found."""
    start = _find_torch_state(generator)
    if start is None or not _shows_torch_normals():
        return None
    return _bytes_at(start, _TORCH_PEEKED_BYTES), _bytes_at(start + _TORCH_STATE_BYTES, _TORCH_NORMALS_BYTES)


@lru_cache(maxsize=1)
def _shows_torch_normals() -> bool:
    probe = torch.Generator()
    start = _find_torch_state(probe)
    return start is not None and _keeps_torch_normals_behind(start, probe)


_python_address = _find_python_state()
_python_bytes = None if _python_address is None else _bytes_at(_python_address)

PYTHON = HostGenerator(random.getstate, random.setstate, _peek_python)
NUMPY = HostGenerator(_ask_numpy, _put_numpy, _Peek(numpy.random.get_bit_generator, _find_numpy_state))  # type: ignore[attr-defined]
TORCH = HostGenerator(_ask_torch, _put_torch, _Peek(lambda: torch.default_generator, _find_torch_bytes))


# --- torch's, of several devices --------------------------------------------------------------------------------------


@contextmanager
def drawing_from(states: dict[torch.device, torch.Tensor]) -> Iterator[None]:
    """In this context torch draws what it drew when its random states were read; afterwards they are as before."""
    now = random_states(states)
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(now)


def random_states(devices: Iterable[torch.device]) -> dict[torch.device, torch.Tensor]:
    """Read torch's random states of some devices."""
    return {
        device: torch.get_rng_state()
        if device.type == "cpu"
        else torch.get_device_module(device.type).get_rng_state(device)
        for device in devices
    }


def set_random_states(states: dict[torch.device, torch.Tensor]) -> None:
    """Set torch's random states."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device.type).set_rng_state(state, device)


# --- as checkpoints keep them -----------------------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch, as what can be loaded without running code."""
    version, words, spare = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), spare],
        "numpy": _of_numpy(),
        "torch": torch.get_rng_state(),
    }
    if DeviceKind.of(device.type).has_own_memory:
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def _of_numpy() -> list[Any] | dict[str, Any]:
    """The state of NumPy's global generator; as its own dict, with tensors, where the user has replaced it."""
    state = _ask_numpy()
    if state["bit_generator"] != "MT19937":
        tensors: dict[str, Any] = _mapped(state, numpy.ndarray, torch.from_numpy)
        return tensors
    words = torch.from_numpy(state["state"]["key"].astype(numpy.int64))
    return ["MT19937", words, state["state"]["pos"], state["has_gauss"], state["gauss"]]


def _set_numpy(saved: list[Any] | dict[str, Any]) -> None:
    before = saved["bit_generator"] if isinstance(saved, dict) else saved[0]
    now = _ask_numpy()["bit_generator"]
    if before != now:
        raise ValueError(
            f"`ckpt_path` has random numbers of `numpy.random.{before}`, and NumPy's global generator is {now}. Set it "
            f"as before (`numpy.random.set_bit_generator(numpy.random.{before}())`) when the run begins."
        )
    if isinstance(saved, dict):
        _put_numpy(_mapped(saved, torch.Tensor, torch.Tensor.numpy))
    else:
        kind, keys, *numbers = saved
        _put_numpy((kind, keys.numpy().astype(numpy.uint32), *numbers))


def _mapped(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(entry, kind, convert) for key, entry in value.items()}
    return convert(value) if isinstance(value, kind) else value


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to a `random_state`; one of the device only where there is such a device.

    Args:
        state: From `random_state`, on whichever device of a machine; or as modules wrote it up to version 0.1, with the
            states of all CUDA devices by their indices, of which that of this index is taken, or the only one.
        device: The rank's device.
    """
    if "cpu" in state:
        places: list[torch.Tensor] = state["cuda"]
        index = 0 if len(places) == 1 else device.index or 0
        state = {"torch": state["cpu"]} | ({"device": places[index]} if index < len(places) else {})
    if "python" in state:
        version, words, spare = state["python"]
        random.setstate((version, tuple(words), spare))
    if "numpy" in state:
        _set_numpy(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if DeviceKind.of(device.type).has_own_memory and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"].cpu(), device)
