"""Copies in host memory of tensors of every kind."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from lightning_memfit.fitting.recovery.host_states import HostCopy


def test_a_copy_is_written_back():
    tensor = torch.arange(4.0)
    copy = HostCopy(tensor)
    tensor.zero_()
    copy.restore(tensor)
    assert tensor.tolist() == [0, 1, 2, 3]
    assert copy.moved_to(torch.device("cpu")).data_ptr() != tensor.data_ptr()


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
