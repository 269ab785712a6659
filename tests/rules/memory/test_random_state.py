"""A rank's random state is that of its own device, wherever the run goes on."""

from types import SimpleNamespace

import torch

from lightning_memfit.memory.generators import random_state, set_random_state


def test_a_run_goes_on_with_the_state_of_the_device_that_was_used(monkeypatch):
    states = {index: torch.tensor([index]) for index in range(4)}
    fake = SimpleNamespace(
        get_rng_state=lambda device: states[device.index],
        set_rng_state=lambda state, device: states.__setitem__(device.index, state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    set_random_state(random_state(torch.device("cuda", 1)), torch.device("cuda", 0))
    assert {index: int(state) for index, state in states.items()} == {0: 1, 1: 1, 2: 2, 3: 3}
