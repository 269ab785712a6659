"""Save and put back the states of random generators."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch

from lightning_memfit.memory.kind import DeviceKind


class HostGenerator(NamedTuple):
    """A global generator of random numbers."""

    state: Callable[[], Any]
    """Returns its state, which is not to be changed."""
    restore: Callable[[Any], None]
    """Sets it to a state that it had."""


def _ask_numpy() -> Any:
    return numpy.random.get_state(legacy=False)  # noqa: NPY002


def _put_numpy(state: Any) -> None:
    numpy.random.set_state(state)  # noqa: NPY002


def _ask_torch() -> bytes:
    """Return the state as bytes: a tensor would count on a simulated device."""
    return torch.default_generator.get_state().numpy().tobytes()


def _put_torch(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


PYTHON = HostGenerator(random.getstate, random.setstate)
NUMPY = HostGenerator(_ask_numpy, _put_numpy)
TORCH = HostGenerator(_ask_torch, _put_torch)


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
        state: From `random_state`, on whichever device of a machine.
        device: The rank's device.
    """
    if "python" in state:
        version, words, spare = state["python"]
        random.setstate((version, tuple(words), spare))
    if "numpy" in state:
        _set_numpy(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if DeviceKind.of(device.type).has_own_memory and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"].cpu(), device)
