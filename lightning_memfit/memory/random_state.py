"""The state of a rank's generators of random numbers, as checkpoints keep it."""

import random
from typing import Any

import numpy as np
import torch

from lightning_memfit.memory.kind import DeviceKind


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch, as what can be loaded without running code."""
    kind, keys, *numbers = np.random.get_state()  # noqa: NPY002  (it is the global one that counts)
    version, words, spare = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), spare],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *numbers],
        "torch": torch.get_rng_state(),
    }
    if DeviceKind.of(device.type).has_own_memory:
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


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
        kind, keys, *numbers = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *numbers))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if DeviceKind.of(device.type).has_own_memory and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"].cpu(), device)
