"""What micro-batches log makes what the whole batch would have logged."""

from typing import Any

import pytest
import torch

from lightning_memfit.fitting.step.log_rules import LogCall, LogRules

PARTS = [(30.0, 3), (10.0, 2)]
"""Tokens and samples of two micro-batches."""


def calls(values: list[float], name: str = "value", **arguments: Any) -> list[LogCall]:
    return [LogCall(part, "training_step", name, torch.tensor(one), arguments) for part, one in enumerate(values)]


@pytest.mark.parametrize(
    ("whole", "values", "expected"),
    [
        (2.5, [2.0, 4.0], (5 * 30 + 1 * 10) / 40),  # as the loss: a mean over tokens
        (2.8, [2.0, 4.0], (5 * 3 + 1 * 2) / 5),  # over samples
        (6.0, [2.0, 4.0], 6.0),  # a sum
    ],
)
def test_means_and_sums_are_told_apart_once(whole: float, values: list[float], expected: float) -> None:
    rules = LogRules()
    rules.compare(calls([whole]), calls(values), PARTS, 1e-6)
    (merged,) = rules.merge(calls([5.0, 1.0]), PARTS)
    assert float(merged.value) == pytest.approx(expected)


def test_what_nothing_explains_is_named_once() -> None:
    rules = LogRules()
    with pytest.warns(UserWarning, match="'perplexity'"):
        rules.compare(calls([2.6], "perplexity"), calls([2.0, 4.0], "perplexity"), PARTS, 1e-6)
    rules.compare(calls([2.6], "perplexity"), calls([2.0, 4.0], "perplexity"), PARTS, 1e-6)
    (merged,) = rules.merge(calls([2.0, 4.0], "perplexity"), PARTS)
    assert float(merged.value) == pytest.approx(2.5)


@pytest.mark.parametrize(("reduce_fx", "expected"), [("sum", 6.0), ("max", 4.0), (torch.min, 2.0), ("mean", 2.5)])
def test_reductions_are_those_that_are_asked_for(reduce_fx: Any, expected: float) -> None:
    (merged,) = LogRules().merge(calls([2.0, 4.0], reduce_fx=reduce_fx), PARTS)
    assert float(merged.value) == pytest.approx(expected)


def test_a_batch_size_that_was_chosen_weighs_and_adds_up() -> None:
    both = [LogCall(p, "f", "n", torch.tensor(v), {"batch_size": b}) for p, v, b in ((0, 2.0, 1), (1, 4.0, 7))]
    (merged,) = LogRules().merge(both, PARTS)
    assert float(merged.value) == pytest.approx((2 + 28) / 8)
    assert merged.arguments["batch_size"] == 8


def test_a_micro_batch_without_labels_has_no_share() -> None:
    (merged,) = LogRules().merge(calls([3.0, float("nan")]), [(5.0, 3), (0.0, 2)])
    assert float(merged.value) == 3.0


def test_a_value_for_each_sample_stays_one_for_each_sample() -> None:
    rules = LogRules()
    parts = [LogCall(p, "f", "n", torch.tensor(float(v)), {}) for p, v in ((0, 1), (0, 2), (1, 3))]
    rules.compare(parts, parts, [(2.0, 2), (1.0, 1)], 1e-6)
    assert [float(call.value) for call in rules.merge(parts, [(2.0, 2), (1.0, 1)])] == [1.0, 2.0, 3.0]


def test_values_of_zero_tell_nothing() -> None:
    rules = LogRules()
    rules.compare(calls([0.0]), calls([0.0, 0.0]), PARTS, 1e-6)
    rules.compare(calls([6.0]), calls([2.0, 4.0]), PARTS, 1e-6)
    (merged,) = rules.merge(calls([2.0, 4.0]), PARTS)
    assert float(merged.value) == 6.0
