"""What a loss is a mean over: which rules a batch allows, how they weigh its samples, and which of them are refuted."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_memfit.fitting.step.loss_weights import SAMPLES, LossWeights, Rule
from lightning_memfit.fitting.step.split import BatchSplitter

LABELS = torch.tensor([[1, 2, -100], [-100, -100, -100], [4, 5, 6], [7, -100, -100]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    x: Tensor
    y: Tensor


def found(batch: Any, num_samples: int = 4, module: nn.Module | None = None) -> dict[Rule, list[float]]:
    return LossWeights(module=module).weights(batch, num_samples)


def weights_under(batch: Any, rule: Rule, module: nn.Module | None = None, num_samples: int = 4) -> list[float]:
    return found(batch, num_samples, module)[rule]


def test_samples_weigh_alike_and_come_first() -> None:
    rules = LossWeights().candidates({"x": torch.rand(4, 3, 2)}, 4)
    assert rules == [SAMPLES]
    assert next(iter(found((torch.rand(4, 3), torch.tensor([1, 2, 3, 4]))))) == SAMPLES


def test_labels_without_the_ignored_index_come_first() -> None:
    assert LossWeights().candidates({"labels": LABELS}, 4)[0] == Rule("unmasked", ("labels",), -100)
    assert LossWeights().candidates({"deep": [{"labels": LABELS}]}, 4)[0].path == ("deep", 0, "labels")


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"labels": LABELS}, ("labels",)),
        ({"targets": LABELS}, ("targets",)),
        ((LABELS, LABELS), (1,)),
        (LABELS, ()),
        ({"a": [{"b": LABELS}]}, ("a", 0, "b")),
        (Pair(torch.rand(4, 2), LABELS), (1,)),
        (Record(torch.rand(4, 2), LABELS), ("y",)),
    ],
)
def test_ignored_labels_are_found_anywhere(batch: Any, path: tuple[Any, ...]) -> None:
    assert weights_under(batch, Rule("unmasked", path, -100)) == [2, 0, 3, 1]
    assert weights_under(batch, Rule("unmasked", path, -100, start=1)) == [1, 0, 2, 0]


def test_ignored_indices_of_the_modules_losses_and_configuration() -> None:
    module = nn.ModuleDict({"loss": nn.CrossEntropyLoss(ignore_index=37), "net": nn.Linear(1, 1)})
    module["net"].config = SimpleNamespace(pad_token_id=50)
    labels = torch.tensor([[37, 50, 3], [37, 37, 3]])
    assert weights_under((labels,), Rule("unmasked", (0,), 37), module, 2) == [2, 1]
    assert weights_under((labels,), Rule("unmasked", (0,), 50), module, 2) == [2, 3]
    assert Rule("unmasked", (0,), 37) not in found((labels,), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int64])
def test_masks(dtype: torch.dtype) -> None:
    batch = {"x": torch.rand(4, 3, 5), "mask": MASK.to(dtype)}
    assert weights_under(batch, Rule("total", ("mask",))) == [2, 1, 3, 2]
    assert weights_under(batch, Rule("total", ("mask",), start=1)) == [1, 0, 2, 1]
    assert weights_under(batch, Rule("total", ("mask",), stop=1)) == [2, 1, 2, 2]


def test_features_are_no_masks() -> None:
    rules = found({"x": torch.rand(4, 3), "image": torch.ones(4, 3, 2)})
    assert {rule.kind for rule in rules} == {"samples"}


def test_weights_and_lengths_of_samples() -> None:
    batch = {"weight": torch.tensor([0.5, 1.0, 0.0, 2.0]), "length": torch.tensor([3, 1, 4, 2])}
    assert weights_under(batch, Rule("total", ("weight",))) == [0.5, 1.0, 0.0, 2.0]
    assert weights_under(batch, Rule("total", ("length",))) == [3, 1, 4, 2]


def test_class_weights_of_losses_and_attributes() -> None:
    module = nn.Module()
    module.loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]))
    module.balance = torch.tensor([3.0, 1.0])
    module.trained = nn.Parameter(torch.ones(3))
    labels = torch.tensor([0, 1, 2, -100])
    assert weights_under((labels,), Rule("classes", (0,), "loss.weight"), module) == [0.5, 1.0, 2.0, 0.0]
    assert weights_under((labels,), Rule("classes", (0,), "balance"), module) == [3.0, 1.0, 0.0, 0.0]
    assert {rule.value for rule in found((labels,), 4, module) if rule.kind == "classes"} == {"loss.weight", "balance"}


def test_what_has_no_row_per_sample_weighs_nothing() -> None:
    batch = {"a": torch.ones(3, 4), "b": torch.tensor(1), "c": "text", "d": torch.ones(0, 2), "e": [1, 2], "f": None}
    assert list(found(batch)) == [SAMPLES]
    assert list(found({"z": torch.ones(4, dtype=torch.complex64)})) == [SAMPLES]


# --- disputes ---------------------------------------------------------------------------------------------------------


def test_rules_that_agree_are_not_in_dispute() -> None:
    labels = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    local = LossWeights().read({"labels": labels}, 4)
    assert not local.is_disputed([2, 2])
    assert not local.is_disputed([1, 3])
    assert local.weights_of([], [1, 3]) == [2, 6]


def test_rules_that_differ_are_in_dispute_where_the_cut_shows_it() -> None:
    labels = torch.tensor([[1, -100], [3, 4], [5, -100], [7, 8]])
    local = LossWeights().read({"labels": labels}, 4)
    assert local.is_disputed([1, 3])
    assert local.is_disputed([1] * 4)
    assert not local.is_disputed([4])
    assert LossWeights().read({"labels": labels[[0, 1, 0, 1]]}, 4).is_disputed([1, 3])


def test_refuted_rules_are_left_out_for_every_batch() -> None:
    weights = LossWeights()
    rules = weights.candidates((LABELS,), 4)
    right = Rule("unmasked", (0,), -100)
    weights.refute(rule for rule in rules if rule != right)
    assert weights.candidates((LABELS,), 4) == [right]
    assert weights.read((LABELS,), 4).weights_of([], [1, 1, 2]) == [2, 0, 4]
    assert not weights.read((LABELS,), 4).is_disputed([1, 3])
    assert weights.candidates((LABELS[:2],), 2) == [right]
    # The same rules in a batch of another layout are refuted as well; those on other tensors are open.
    others = weights.candidates((LABELS, LABELS.float()[:, 0]), 4)
    assert right in others
    assert {rule.path for rule in others} == {(0,), (1,)}
    assert [rule for rule in others if rule.path == (0,)] == [right]


def test_samples_weigh_alike_when_all_rules_are_refuted() -> None:
    weights = LossWeights()
    weights.refute(weights.candidates((LABELS,), 4))
    assert weights.candidates((LABELS,), 4) == [SAMPLES]
    assert weights.read((LABELS,), 4).weights_of([], [3, 1]) == [3, 1]


def test_sums_are_not_weighed() -> None:
    weights = LossWeights()
    assert not weights.is_sum
    weights.take_sum()
    assert weights.is_sum
    assert weights.candidates({"labels": LABELS}, 4) == [SAMPLES]
    assert not weights.read({"labels": LABELS}, 4).is_disputed([1, 3])


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4), st.data())
def test_rows_of_a_part_weigh_what_they_weigh_in_the_whole(mask: list[list[bool]], data: Any) -> None:
    kept = torch.tensor(mask)
    count = len(kept)
    batch = {"labels": torch.arange(5 * count).reshape(count, 5).masked_fill(~kept, -100), "mask": kept.double()}
    first = data.draw(st.integers(1, count))
    sizes = [first, count - first] if first < count else [count]
    parts = BatchSplitter(expected=count).split(batch, sizes)
    apart = [LossWeights().weights(part, size) for part, size in zip(parts, sizes, strict=True)]
    for rule, rows in LossWeights().weights(batch, count).items():
        assert [value for part in apart for value in part[rule]] == rows
    local = LossWeights().read(batch, count)
    assert local.weight == float(kept.sum())
    assert local.weights_of(parts, sizes) == [float(part["mask"].sum()) for part in parts]
