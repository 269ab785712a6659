"""Paged states without CUDA: parameters on `meta` stand for those on a card, and host memory for CUDA's."""

import copy
import io
from collections import defaultdict
from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lightning_memfit.optim.eight_bit import repage_states, to_bitsandbytes
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit

SHAPE = (512, 512)
NUM_BYTES = 2 * 512 * 512
KEYS = ("state1", "state2")


@pytest.fixture
def allocated(monkeypatch):
    """Sizes of the paged buffers that were made."""
    sizes = []

    def get_paged(*shape, dtype, device):
        buffer = torch.full(shape, 3, dtype=dtype)
        buffer.is_paged, buffer.page_deviceid = True, device.index
        sizes.append(buffer.nbytes)
        return buffer

    manager = bnb.functional.GlobalPageManager.get_instance()
    monkeypatch.setattr(manager, "paged_tensors", [])
    monkeypatch.setattr("lightning_memfit.optim.paging._FREE", defaultdict(list))
    monkeypatch.setattr("bitsandbytes.functional.get_paged", get_paged)
    monkeypatch.setattr("bitsandbytes.functional.fill", torch.Tensor.fill_)
    return sizes


def paged(original=torch.optim.AdamW):
    return to_bitsandbytes(original([nn.Parameter(torch.empty(SHAPE, device="meta"))]), paged=True)


def make_states(optimizer, value=0):
    group = optimizer.param_groups[0]
    (parameter,) = group["params"]
    optimizer.init_state(group, parameter, 0, 0)
    state = optimizer.state[parameter]
    for key in KEYS:
        assert state[key].is_paged
        assert not state[key].any()
        state[key].fill_(value)
    return state


def state_of(optimizer):
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


def test_states_that_a_trial_has_dropped_are_used_again(allocated):
    optimizer = paged()
    for _ in range(3):  # a trial, a first step that failed, the step
        state = make_states(optimizer, 7)
        optimizer.state.clear()
        del state
    make_states(optimizer)
    assert sum(allocated) == NUM_BYTES
    make_states(other := paged())
    assert sum(allocated) == 2 * NUM_BYTES  # both live
    del other


def loaded(optimizer):
    """The optimizer with states that were saved and loaded, and stay on the host."""
    file = io.BytesIO()
    torch.save({"state": dict(enumerate(optimizer.state.values()))}, file)
    file.seek(0)
    saved = {**optimizer.state_dict(), **torch.load(file, weights_only=False)}
    optimizer.load_state_dict(saved, move_to_device=False)
    return optimizer


@pytest.mark.parametrize("way", [copy.deepcopy, loaded])
def test_copies_are_paged_again(way, allocated):
    optimizer = paged()
    before = make_states(optimizer, 7)
    copied = way(optimizer)
    repage_states(copied)
    for key in KEYS:
        state = state_of(copied)[key]
        assert state.is_paged
        assert state.eq(7).all()
        assert state.data_ptr() != before[key].data_ptr()


def test_a_second_fit_pages_states_that_lightning_has_moved(allocated):
    """Before forward, which may need the room on the card."""
    callback, module = Optimizer8bit(paged=True), nn.Linear(1, 1)
    optimizer = callback._convert(module, torch.optim.AdamW([nn.Parameter(torch.empty(SHAPE, device="meta"))]))
    state = make_states(optimizer, 7)
    for key in KEYS:
        state[key] = state[key].clone()  # as `_optimizers_to_device` does on CUDA
    assert callback._convert(module, optimizer) is optimizer
    callback.on_train_start(SimpleNamespace(optimizers=[optimizer]), module)
    assert all(state[key].is_paged and state[key].eq(7).all() for key in KEYS)
    assert sum(allocated) == NUM_BYTES


def test_states_of_a_checkpoint_stay_off_the_card(allocated, monkeypatch):
    optimizer = paged()
    (parameter,) = optimizer.param_groups[0]["params"]
    state = make_states(optimizer, 7)
    for key in ("absmax1", "absmax2", "qmap1", "qmap2"):
        state[key] = torch.zeros(state[key].shape)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = paged()
    strategy = SingleDeviceStrategy("meta")
    strategy.optimizers = [resumed]
    model, callback = nn.Linear(1, 1), Optimizer8bit(paged=True)
    model.configure_optimizers = lambda: resumed
    callback.apply(SimpleNamespace(strategy=strategy), model)
    moved = []
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **kwargs: moved.append(self) or to(self, *args, **kwargs)
    )
    strategy.load_optimizer_state_dict({"optimizer_states": [saved]})
    assert not any(tensor.shape == SHAPE for tensor in moved)
    loaded_state = state_of(resumed)
    assert all(loaded_state[key].is_paged and loaded_state[key].eq(7).all() for key in KEYS)
    assert loaded_state["absmax1"].device == loaded_state["qmap2"].device == parameter.device
    callback.restore()
    assert "load_optimizer_state_dict" not in vars(strategy)


def test_upstream_still_has_what_is_used_of_it():
    assert isinstance(bnb.functional.GlobalPageManager.get_instance().paged_tensors, list)
    assert callable(bnb.functional.get_paged)
