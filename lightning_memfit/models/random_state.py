"""State of torch's random generators, kept in checkpoints so that dropout continues where it stopped."""

from typing import Any

import torch


def collect_random_state() -> dict[str, Any]:
    """Return the state of the CPU generator and of every visible CUDA device's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to a state from `collect_random_state`, as far as this machine has the devices."""
    torch.set_rng_state(state["cpu"].cpu())
    for index, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(value.cpu(), index)
