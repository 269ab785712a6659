import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.profile.integers import AssumedValues, RealIntegers, UnknownSizeError
from lightning_memfit.profile.patches import readable_fakes
from tests.truth.profile.modules import faked


@pytest.fixture
def integers():
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    integers = RealIntegers(fake_mode)
    with fake_mode, integers:
        yield integers


IDS = torch.tensor([[5, 2, 0, 0], [7, 7, 1, 0]])
MASK, FEATURES = IDS > 0, torch.randn(2, 3)


def test_the_batch_becomes_fake_and_keeps_its_integers(integers):
    fake = faked(integers, {"ids": IDS, "x": FEATURES, "name": "kept", "nested": [(MASK,)]})
    assert isinstance(fake["ids"], FakeTensor)
    assert isinstance(fake["x"], FakeTensor)
    assert fake["name"] == "kept"
    assert fake["nested"][0][0].sum().item() == 5
    assert integers.value_of(fake["x"]) is None
    assert not isinstance(IDS, FakeTensor)


def test_branches_follow_the_real_ids(integers):
    ids = faked(integers, IDS)
    assert (ids == 7).any()
    assert not (ids == 9).any()
    assert (ids != 0).sum(1).max().item() == 3
    assert ids.tolist() == IDS.tolist()
    assert torch.equal(ids, ids.clone())
    assert integers.assumptions == []


def test_sizes_follow_the_real_ids(integers):
    ids = faked(integers, IDS)
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.linspace(0.1, 1, 9),
        lambda: torch.logspace(0, 2, 5, dtype=torch.float64),
        lambda: torch.eye(3),
        lambda: torch.tril_indices(3, 3),
        lambda: torch.hann_window(16),
        lambda: 1 / 10 ** (torch.arange(0, 8, 2) / 8),
    ],
)
def test_constants_are_known(integers, make):
    made = make().tolist()
    with _disable_current_modes():
        assert made == make().tolist()
    assert integers.assumptions == []


def test_constants_too_large_to_carry_are_not_computed(integers):
    assert integers.value_of(torch.linspace(0, 1, 10**12)) is None
    assert integers.value_of(torch.arange(10**12)) is None


@pytest.mark.parametrize("bits", [8, 4])
def test_tables_that_torchao_remembers_for_the_process_hold_real_numbers(integers, bits):
    with _disable_current_modes():
        states = pytest.importorskip(f"torchao.optim.subclass_{bits}bit")
    for table in (states.get_qmap_signed, states.get_qmap_unsigned):
        table.cache_clear()
        traced = table()
        table.cache_clear()
        with _disable_current_modes():
            assert traced == table()


def test_floats_made_of_integers_alone_are_known(integers):
    ids = faked(integers, IDS)
    assert (ids != 0).float().mean().item() == pytest.approx(5 / 8)
    assert (torch.rand(2, 4) * (ids != 0)).sum().item() == 1.0  # not of integers alone
    [assumption] = integers.assumptions
    line = inspect.currentframe().f_lineno - 2  # type: ignore[union-attr]
    assert assumption.startswith(f"an unknown float32 value was read as 1.0 at {__file__}:{line}, in `test_floats")


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
    ids = faked(integers, IDS)
    row = ids[0]
    write(ids)
    assert row.sum().item() == ids.sum().item() == AssumedValues().integer
    assert integers.assumptions


def test_known_values_can_be_written_without_touching_the_batch(integers):
    ids = faked(integers, IDS)
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


def test_tokens_are_routed_to_experts_evenly(integers):
    experts = torch.randn(6, 4).softmax(-1).topk(2).indices
    assert integers.taken == []  # nothing depends on them yet
    assert torch.nn.functional.one_hot(experts, 4).sum((0, 1)).tolist() == [3, 3, 3, 3]
    assert torch.zeros(6, 4).scatter(1, experts, 1).long().sum(0).tolist() == [3, 3, 3, 3]
    assert [len((experts == number).nonzero()) for number in range(4)] == [3, 3, 3, 3]
    assert all(len(set(row)) == 2 for row in experts.tolist())
    assert set(integers.taken) == {
        "the top 2 of 4 unknown scores in 6 rows (tokens to experts, say) were taken to be spread evenly"
    }
    assert integers.assumptions == []


def test_the_largest_along_any_dimension_have_places(integers):
    scores = torch.randn(3, 5, 2)
    assert scores.argmax(1).tolist() == [[0, 1], [2, 3], [4, 0]]
    assert scores.max(-1, keepdim=True).indices.squeeze(-1).tolist() == [
        [0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
        [0, 1, 0, 1, 0],
    ]
    assert scores.argmax().item() == 0
    assert scores.topk(5, dim=1).indices.sort(1).values.tolist() == [[[n, n] for n in range(5)]] * 3


def test_predictions_compared_with_labels_stay_unknown(integers):
    labels = faked(integers, torch.tensor([0, 1, 2]))
    right = torch.randn(3, 3).argmax(1) == labels
    assert right.all().item() is AssumedValues().boolean
    with pytest.raises(UnknownSizeError):
        labels[right]
    assert integers.taken == []


def test_indices_in_names_are_known(integers):
    ids = faked(integers, IDS)
    assert f"expert_{ids[0, 0]}" == "expert_FakeTensor(..., size=(), dtype=torch.int64)"
    with readable_fakes(integers):
        assert f"expert_{ids[0, 0]}" == "expert_5"
        assert f"{torch.randn(()):.1f}" == "1.0"


def test_values_go_with_their_tensor(integers):
    ids = faked(integers, IDS)
    assert len(integers._values) == 1
    del ids
    assert len(integers._values) == 0


def test_a_tensor_made_of_fakes_is_no_literal(integers):
    """Quantized states of torchao are such tensors; kernels that it compiles for them ended the process."""
    part = torch.randn(3)
    with _disable_current_modes():
        made, literal = TwoTensor(part, part), torch.ones(3)
    assert integers.value_of(literal).tolist() == [1, 1, 1]
    assert integers.value_of(made) is None
    assert not integers._may_be_known(made)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), lambda: torch.rand_like(FEATURES[0, 0])])
def test_drawn_numbers_are_known_to_lie_between_0_and_1(integers, draw):
    """Models that leave layers out with some probability draw and compare where that is 0, too."""
    drawn = draw()
    assert not drawn < 0.0
    assert not drawn <= -0.5
    assert not drawn > 1
    assert not drawn >= 1.0
    assert drawn >= 0
    assert drawn > -0.1
    assert drawn < 1
    assert drawn <= 1.5
    assert not integers.draw_decided
    assert not drawn < 0.1
    assert integers.draw_decided
    assert drawn.item() == 0.5
    assert integers.assumptions == []
    drawn.view(1).mul_(-2)
    assert integers.value_of(drawn < 0) is None
