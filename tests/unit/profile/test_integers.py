import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.profile.integers import AssumedValues, RealIntegers, UnknownSizeError


@pytest.fixture
def integers():
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    integers = RealIntegers(fake_mode)
    with fake_mode, integers:
        yield integers


IDS = torch.tensor([[5, 2, 0, 0], [7, 7, 1, 0]])
MASK, FEATURES = IDS > 0, torch.randn(2, 3)


def test_the_batch_becomes_fake_and_keeps_its_integers(integers):
    fake = integers.fake_batch({"ids": IDS, "x": FEATURES, "name": "kept", "nested": [(MASK,)]})
    assert isinstance(fake["ids"], FakeTensor)
    assert isinstance(fake["x"], FakeTensor)
    assert fake["name"] == "kept"
    assert fake["nested"][0][0].sum().item() == 5
    assert integers.value_of(fake["x"]) is None
    assert not isinstance(IDS, FakeTensor)


def test_branches_follow_the_real_ids(integers):
    ids = integers.fake_batch(IDS)
    assert (ids == 7).any()
    assert not (ids == 9).any()
    assert (ids != 0).sum(1).max().item() == 3
    assert ids.tolist() == IDS.tolist()
    assert torch.equal(ids, ids.clone())
    assert integers.assumptions == []


def test_sizes_follow_the_real_ids(integers):
    ids = integers.fake_batch(IDS)
    mask = ids != 0
    hidden = torch.randn(2, 4, 8)
    assert hidden[mask].shape == (5, 8)
    assert mask.nonzero().shape == (5, 2)
    assert ids.unique().shape == (5,)
    assert torch.masked_select(ids, mask).tolist() == [5, 2, 7, 7, 1]
    assert torch.repeat_interleave(torch.randn(2, 3), mask.sum(1), dim=0).shape == (5, 3)
    assert torch.bincount(ids.flatten()).tolist() == [3, 1, 1, 0, 0, 1, 0, 2]
    assert torch.zeros(int(ids.max())).shape == (7,)
    assert integers.assumptions == []


def test_values_made_in_the_step_are_known(integers):
    positions = torch.arange(6) + 2
    assert positions[-1].item() == 7
    assert torch.full((2,), 3).sum().item() == 6


def test_floats_made_of_integers_alone_are_known(integers):
    ids = integers.fake_batch(IDS)
    assert (ids != 0).float().mean().item() == pytest.approx(5 / 8)
    assert (torch.rand(2, 4) * (ids != 0)).sum().item() == 1.0  # not of integers alone
    assert integers.assumptions == ["an unknown float32 value was read as 1.0"]


@pytest.mark.parametrize(
    "write",
    [
        lambda ids: ids.copy_(torch.randint(9, (2, 4))),
        lambda ids: ids[0].random_(3),
        lambda ids: ids.masked_fill_(torch.randn(2, 4) > 0, 3),
        lambda ids: ids.view(-1).add_(torch.randint(9, (8,))),
    ],
)
def test_values_that_unknown_ones_were_written_over_are_forgotten(integers, write):
    ids = integers.fake_batch(IDS)
    row = ids[0]
    write(ids)
    assert row.sum().item() == ids.sum().item() == AssumedValues().integer
    assert integers.assumptions


def test_known_values_can_be_written_without_touching_the_batch(integers):
    ids = integers.fake_batch(IDS)
    row = ids[0]
    ids[ids == 0] = -100
    ids.add_(1)
    assert row.tolist() == [6, 3, -99, -99]
    with _disable_current_modes():
        assert IDS.tolist() == [[5, 2, 0, 0], [7, 7, 1, 0]]
    assert integers.assumptions == []


@pytest.mark.parametrize(
    ("assumed", "floating", "boolean"), [(AssumedValues(), 1.0, False), (AssumedValues(-3.0, True, 0), -3.0, True)]
)
def test_unknown_values_are_assumed_and_noted(assumed, floating, boolean):
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    integers = RealIntegers(fake_mode, assumed)
    with fake_mode, integers:
        x = torch.randn(3)
        assert x.sum().item() == floating
        assert bool((x > 0.3).any()) is boolean
        assert len(integers.assumptions) == 2


def test_values_are_taken_to_be_finite(integers):
    x = torch.randn(3)
    assert torch.isfinite(x).all()
    assert not torch.isnan(x).any()
    assert not torch.isinf(x).any()
    assert set(integers.assumptions) == {"floating-point values were taken to be finite"}
    assert not (x == x.clone()).all()  # a comparison of two tensors stays unknown


def test_finiteness_that_nothing_reads_is_no_assumption(integers):
    x = torch.randn(3)
    torch.where(torch.isnan(x), 0.0, x).sum()
    assert integers.assumptions == []


@pytest.mark.parametrize(
    "select",
    [lambda x: x[x > 0], lambda x: (x > 0).nonzero(), lambda x: x.masked_select(x > 0), lambda x: x.long().bincount()],
)
def test_sizes_that_depend_on_floats_are_refused(integers, select):
    with pytest.raises(UnknownSizeError, match=r"float|unknown"):
        select(torch.randn(5))


def test_counts_with_a_length_are_assumed_to_keep_to_it(integers):
    assert torch.bincount(torch.randn(5, 4).argmax(1), minlength=4).shape == (4,)
    assert "minlength=4" in integers.assumptions[0]


def test_values_go_with_their_tensor(integers):
    ids = integers.fake_batch(IDS)
    assert len(integers._values) == 1
    del ids
    assert len(integers._values) == 0


def test_large_tensors_lose_their_values():
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    integers = RealIntegers(fake_mode, max_elements=4)
    with fake_mode, integers:
        assert integers.value_of(torch.arange(4)) is not None
        assert integers.value_of(torch.arange(5)) is None
