import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.profile.integers import RealIntegers
from lightning_memfit.profile.patches import readable_fakes


@pytest.fixture
def integers():
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    integers = RealIntegers(fake_mode)
    with fake_mode, integers, readable_fakes(integers):
        yield integers


IDS = torch.tensor([4, 1])


def test_integers_are_read_as_they_are(integers):
    fake = integers.fake_batch(IDS)
    assert fake.numpy().tolist() == [4, 1]
    assert np.asarray(fake).max() == 4
    assert fake.cpu().detach().numpy().dtype == np.int64
    assert integers.assumptions == []


def test_what_numpy_changes_stays_in_numpy(integers):
    fake = integers.fake_batch(IDS)
    fake.numpy()[0] = 99
    assert fake.tolist() == [4, 1]


def test_floats_are_assumed(integers):
    assert torch.randn(2, 3).numpy().tolist() == [[1.0] * 3] * 2
    assert integers.assumptions == ["6 unknown float32 values were read as 1.0"]


def test_a_tensor_with_gradient_must_be_detached(integers):
    x = torch.randn(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="detach"):
        x.numpy()
    assert x.detach().numpy().shape == (2,)


def test_tensors_are_made_of_tensors(integers):
    norms = [torch.randn(3).norm(), torch.randn(3).norm()]
    assert torch.tensor(norms).shape == (2,)
    assert torch.as_tensor([norms, norms]).shape == (2, 2)
    ids = integers.fake_batch(IDS)
    assert torch.tensor([ids[0], ids[1], 7]).shape == (3,)
    assert torch.tensor([1.0, 2.0]).dtype is torch.float32


def test_a_numpy_round_trip_is_followed(integers):
    assert torch.from_numpy(torch.randn(2, 3).numpy() * 2).shape == (2, 3)


def test_everything_is_put_back():
    before = torch.tensor, torch.as_tensor
    with pytest.raises(KeyError), readable_fakes(RealIntegers(FakeTensorMode())):
        raise KeyError
    assert before == (torch.tensor, torch.as_tensor)
