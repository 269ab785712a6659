"""Copies of tensors of every kind."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_memfit.fitting.recovery.step_state import held, places_of, put_back
from lightning_memfit.memory import host_copy
from lightning_memfit.memory.host_copy import HostCopy
from lightning_memfit.memory.kind import DeviceKind


def test_a_copy_is_written_back():
    tensor = torch.arange(4.0)
    copy = HostCopy(tensor)
    tensor.zero_()
    copy.restore(tensor)
    assert tensor.tolist() == [0, 1, 2, 3]
    assert copy.moved_to(torch.device("cpu")).data_ptr() != tensor.data_ptr()


@pytest.fixture
def num_waits(monkeypatch):
    """Tensors seem to be on a device with its own memory, and copies to the host are counted."""
    waits = []
    monkeypatch.setattr(host_copy, "DeviceKind", SimpleNamespace(of=lambda device: DeviceKind.of("cuda")))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: waits.append(tensor) or tensor.clone())
    return lambda: len(waits)


def trained_norms():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1 << 15), nn.BatchNorm1d(1 << 15))
    module(torch.randn(8, 4)).sum().backward()
    return module


def test_what_steps_change_is_copied_without_waiting_if_it_is_small(num_waits):
    module = trained_norms()
    large = [buffer for buffer in module.buffers() if buffer.nbytes >= 1 << 16]
    before = [buffer.clone() for buffer in module.buffers()]
    saved = held(place for name, place in places_of(module).items() if "running" in name or "num_batches" in name)
    assert num_waits() == len(large) == 2
    module(torch.randn(8, 4))
    put_back(saved)
    assert all(torch.equal(now, then) for now, then in zip(module.buffers(), before, strict=True))
    again = HostCopy(module[1].running_mean, small_may_stay=True).moved_to(torch.device("cpu"))
    assert again.data_ptr() != module[1].running_mean.data_ptr()
    assert torch.equal(again, before[0])


def test_a_small_copy_goes_to_the_host_if_the_device_is_full(num_waits, monkeypatch):
    tensor, clone = torch.arange(4.0), torch.Tensor.clone

    def refuse(tensor):
        monkeypatch.setattr(torch.Tensor, "clone", clone)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    copied = HostCopy(tensor, small_may_stay=True)
    assert num_waits() == 1
    copied.restore(tensor.zero_())
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.fixture
def wrapper():
    return TwoTensor(torch.arange(4.0), torch.arange(4.0) + 10)


def test_the_tensors_inside_a_wrapper_are_copied_without_its_own_clone(wrapper, monkeypatch):
    monkeypatch.setattr(TwoTensor, "__torch_dispatch__", None)
    copy = HostCopy(wrapper)
    wrapper.a.zero_()
    wrapper.b.zero_()
    copy.restore(wrapper)
    assert wrapper.a.tolist() == [0, 1, 2, 3]
    assert wrapper.b.tolist() == [10, 11, 12, 13]


def test_a_wrapper_is_made_anew(wrapper):
    moved = HostCopy(wrapper).moved_to(torch.device("cpu"))
    assert isinstance(moved, TwoTensor)
    assert torch.equal(moved.b, wrapper.b)
    assert moved.b.data_ptr() != wrapper.b.data_ptr()
