"""A rank's random state is that of its own device, wherever the run goes on."""

from types import SimpleNamespace

import pytest
import torch

from lightning_memfit.models import CausalLM


@pytest.fixture
def devices(monkeypatch):
    """CUDA devices with a number each for the state of their generators."""
    states = {index: torch.tensor([index]) for index in range(4)}
    fake = SimpleNamespace(
        get_rng_state=lambda device: states[device.index],
        set_rng_state=lambda state, device: states.__setitem__(device.index, state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return states


def module_on(index):
    module = CausalLM(config={"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8})
    strategy = SimpleNamespace(root_device=torch.device("cuda", index), global_rank=0, world_size=1)
    trainer = SimpleNamespace(
        world_size=1, callbacks=[], strategy=strategy, global_rank=0, state=SimpleNamespace(status=None)
    )
    module._trainer, module.model = trainer, SimpleNamespace(config=SimpleNamespace(to_dict=dict))
    return module


def test_a_module_goes_on_with_the_state_of_the_device_that_was_used(devices):
    checkpoint = {}
    module_on(1).on_save_checkpoint(checkpoint)
    module = module_on(0)
    module.on_load_checkpoint(checkpoint)
    module.on_train_batch_start(None, 0)
    assert {index: int(state) for index, state in devices.items()} == {0: 1, 1: 1, 2: 2, 3: 3}
