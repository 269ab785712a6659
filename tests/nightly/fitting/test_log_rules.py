"""What a few samples log, whole and in parts, tells how values of micro-batches make that of the batch."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, MetricCollection, RunningMean, RunningSum
from torchmetrics.classification import BinaryAUROC
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from lightning_memfit.fitting.step.log_rules import FOLDS, Fold, LogCall, LogRules, Share, check_metrics, metric_values

LOSS, SAMPLES, PASSED = "loss weight", "samples", "batch_size"


def call(value: Any, part: int = 0, name: str = "x", fx: str = "training_step", **arguments: Any) -> LogCall:
    value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    return LogCall(part, fx, name, value, arguments)


def learn(rules: LogRules, whole: Any, parts: list[Any], weights: Any = (5.0, 2.0), sizes: Any = (1, 3)) -> None:
    rules.learn([call(whole)], [[call(part)] for part in parts], weights, sizes)


def merged(rules: LogRules, values: list[Any], parts: Any = ((5.0, 1), (2.0, 3)), **arguments: Any) -> float:
    calls = [call(value, part, **arguments) for part, value in enumerate(values)]
    (one,) = rules.merge(calls, parts)
    return float(one.value)


# --- learning -------------------------------------------------------------------------------------------------------


@st.composite
def shares(draw: st.DrawFn) -> list[Share]:
    """Parts whose values and weights differ, so that few folds agree."""
    count = draw(st.integers(2, 5))
    values = draw(st.lists(st.integers(1, 10**6), min_size=count, max_size=count, unique=True))
    weights = draw(st.lists(st.tuples(*(st.integers(1, 50),) * 3), min_size=count, max_size=count))
    return [
        Share(torch.tensor(value / 1000, dtype=torch.float64), float(loss), size, passed)
        for value, (loss, size, passed) in zip(values, weights, strict=True)
    ]


@pytest.mark.parametrize("fold", FOLDS, ids=str)
@given(seen=shares(), later=shares())
def test_each_fold_is_learned_from_its_own_kind(fold: Fold, seen: list[Share], later: list[Share]) -> None:
    rules = LogRules()
    parts = [[call(share.value, batch_size=share.batch_size)] for share in seen]
    whole = [call(fold(seen), batch_size=sum(share.batch_size for share in seen))]  # type: ignore[misc]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules.learn(whole, parts, [s.loss_weight for s in seen], [s.num_samples for s in seen], tolerance=1e-9)
    possible = rules._possible["training_step", "x"]
    assert fold in possible
    assert all(float(other(seen)) == pytest.approx(float(fold(seen)), rel=1e-6) for other in possible)
    calls = [call(share.value, part, batch_size=share.batch_size) for part, share in enumerate(later)]
    (one,) = rules.merge(calls, [(share.loss_weight, share.num_samples) for share in later])
    assert any(float(one.value) == float(other(later)) for other in possible)
    assert len(possible) > 1 or float(one.value) == float(fold(later))
    assert one.arguments["batch_size"] == sum(share.batch_size for share in later)  # type: ignore[misc]


@given(value=st.floats(-(2.0**60), 2.0**60, width=32), weights=st.lists(st.floats(0.1, 1e6), min_size=2, max_size=9))
def test_a_constant_stays_what_it_is(value: float, weights: list[float]) -> None:
    constant = torch.tensor(value)
    parts = [(weight, 1) for weight in weights]
    (one,) = LogRules().merge([call(constant, part) for part in range(len(parts))], parts)
    assert torch.equal(one.value, constant)


@pytest.mark.parametrize(
    ("name", "whole", "parts"),
    [
        ("a loss over tokens, logged with batch_size=len(x)", (5 * 2.0 + 2 * 4.0) / 7, (2.0, 4.0)),
        ("a count of tokens", 7.0, (5.0, 2.0)),
        ("perplexity", math.exp((5 * math.log(3.0) + 2 * math.log(7.0)) / 7), (3.0, 7.0)),
        ("accuracy over sequences", 0.75, (0.0, 1.0)),
        ("root mean square error over samples", math.sqrt((1 + 3 * 25) / 4), (1.0, 5.0)),
        ("norm", 5.0, (3.0, 4.0)),
    ],
)
def test_what_users_log(name: str, whole: float, parts: tuple[float, float]) -> None:
    rules = LogRules()
    calls = [[call(value, batch_size=size)] for value, size in zip(parts, (1, 3), strict=True)]
    rules.learn([call(whole, batch_size=4)], calls, (5.0, 2.0), (1, 3))
    (one,) = rules.merge([call(parts[0], 0, batch_size=1), call(parts[1], 1, batch_size=3)], [(5.0, 1), (2.0, 3)])
    assert float(one.value) == pytest.approx(whole)
    assert one.arguments["batch_size"] == 4


def test_what_is_ambiguous_is_narrowed_later() -> None:
    rules = LogRules()
    learn(rules, 0.0, [0.0, 0.0])
    assert merged(rules, [0.0, 1.0]) == pytest.approx(2 / 7)  # like the loss, the likeliest
    assert rules.unsettled == {"x"}
    learn(rules, 0.75, [0.0, 1.0])
    assert rules.unsettled == set()
    assert merged(rules, [0.0, 1.0]) == 0.75
    assert rules.unsettled == set()


def test_names_that_were_never_seen_are_unsettled() -> None:
    rules = LogRules()
    merged(rules, [1.0, 2.0])
    assert rules.unsettled == {"x"}


def test_a_name_that_no_fold_explains_is_named_once() -> None:
    rules = LogRules()
    with pytest.warns(UserWarning, match=r"'x' \(the mean over them by loss weight\).*torchmetrics") as record:
        learn(rules, 100.0, [2.0, 4.0])
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(rules, 1000.0, [2.0, 4.0])
    assert merged(rules, [2.0, 4.0]) == pytest.approx(18 / 7)


def test_an_extreme_of_equal_values_stays_in_doubt() -> None:
    rules = LogRules()
    for _ in range(5):
        learn(rules, 1.0, [0.0, 1.0])  # the accuracy of a class that one of the parts lacks
    assert rules.unsettled == {"x"}
    with pytest.warns(UserWarning, match=r"too few different ones have shown: 'x' \(max\)") as record:
        rules.warn_of_doubts()
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules.warn_of_doubts()


def test_an_extreme_of_several_values_and_a_constant_sum_are_certain() -> None:
    extreme, total = LogRules(), LogRules()
    for largest in (3.0, 5.0, 4.0, 7.0):
        learn(extreme, largest, [1.0, largest])
    for _ in range(2):
        learn(total, 4.0, [1.0, 3.0], weights=(1.0, 1.0))
    for rules in (extreme, total):
        assert rules.unsettled == set()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rules.warn_of_doubts()


def test_random_values_and_broken_ones_are_not_judged() -> None:
    rules = LogRules()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules.learn([call(1.0)], [[call(20.0)], [call(30.0)]], (1, 2), (1, 2), again=[call(1.5)])
        learn(rules, math.nan, [1.0, math.nan])
        learn(rules, math.inf, [1.0, math.inf])
        learn(rules, 2.0, [math.nan, 2.0], weights=(0.0, 3.0))
    assert merged(rules, [1.0, 8.0]) == pytest.approx(3.0)


def test_the_tolerance_is_relative_to_the_values() -> None:
    rules = LogRules()
    learn(rules, 1e-9, [1000.0, -2500.0])  # a mean of nothing but rounding
    assert rules._possible["training_step", "x"] == {Fold("mean", LOSS)} | {Fold("mean", PASSED)}


# --- preference -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce_fx", ["sum", torch.sum, sum])
def test_reduce_fx_comes_first(reduce_fx: Any) -> None:
    assert merged(LogRules(), [1.0, 4.0], reduce_fx=reduce_fx) == 5.0


@pytest.mark.parametrize(("reduce_fx", "expected"), [("max", 4.0), (torch.min, 1.0), ("MEAN", 13 / 7), ("avg", 13 / 7)])
def test_other_reductions(reduce_fx: Any, expected: float) -> None:
    assert merged(LogRules(), [1.0, 4.0], reduce_fx=reduce_fx) == pytest.approx(expected)


def test_a_mean_that_is_summed_over_the_epoch_stays_a_mean() -> None:
    rules = LogRules()
    arguments = {"reduce_fx": "sum"}
    rules.learn([call(13 / 7, **arguments)], [[call(1.0, **arguments)], [call(4.0, **arguments)]], (5, 2), (1, 3))
    assert merged(rules, [1.0, 4.0], **arguments) == pytest.approx(13 / 7)


def test_batch_size_weighs_only_if_it_is_not_the_number_of_samples() -> None:
    def mean(*sizes: int) -> float:
        calls = [call(value, part, batch_size=sizes[part]) for part, value in enumerate((1.0, 4.0))]
        return float(LogRules().merge(calls, [(5.0, 1), (2.0, 3)])[0].value)

    assert mean(1, 3) == pytest.approx(13 / 7)  # `batch_size=len(x)`: like the loss
    assert mean(10, 20) == pytest.approx(3.0)


# --- calls ----------------------------------------------------------------------------------------------------------


def test_a_name_logged_twice_is_logged_twice() -> None:
    calls = [call(value, part) for part, value in ((0, 1.0), (0, 10.0), (1, 3.0), (1, 30.0))]
    assert [float(one.value) for one in LogRules().merge(calls, [(1.0, 1), (1.0, 1)])] == [2.0, 20.0]


def test_a_name_logged_for_every_sample_is_logged_as_often() -> None:
    rules = LogRules()
    rules.learn([call(v) for v in (1.0, 2.0, 3.0)], [[call(1.0)], [call(2.0), call(3.0)]], (1.0, 2.0), (1, 2))
    calls = [call(value, part) for part, value in ((0, 5.0), (0, 6.0), (1, 7.0))]
    assert [float(one.value) for one in rules.merge(calls, [(2.0, 2), (1.0, 1)])] == [5.0, 6.0, 7.0]


def test_a_name_logged_more_often_by_parts_is_named() -> None:
    with pytest.warns(UserWarning, match=r"more or less often.*'x'"):
        LogRules().learn([call(1.0)], [[call(1.0)] * 2, [call(1.0)]], (1, 1), (1, 1))
    with pytest.warns(UserWarning, match=r"more or less often.*'x'"):
        LogRules().learn([], [[call(1.0)], []], (1, 1), (1, 1))


def test_a_name_that_some_parts_log_weighs_those() -> None:
    calls = [call(1.0, 0), call(4.0, 2), call(9.0, 1, name="y")]
    x, y = LogRules().merge(calls, [(5.0, 1), (1.0, 1), (2.0, 3)])
    assert float(x.value) == pytest.approx(13 / 7)
    assert float(y.value) == 9.0
    rules = LogRules()
    rules.learn([call(8.0)], [[call(5.0)], [], [call(3.0)]], (1, 1, 1), (1, 1, 1))
    assert merged(rules, [2.0, 4.0]) == 6.0


def test_hooks_log_apart() -> None:
    calls = [call(1.0, 0), call(3.0, 1), call(7.0, 1, fx="on_before_backward")]
    one, other = LogRules().merge(calls, [(1.0, 1), (1.0, 1)])
    assert (float(one.value), float(other.value), other.fx) == (2.0, 7.0, "on_before_backward")


def test_a_batch_size_of_the_whole_batch_does_not_add_up() -> None:
    rules = LogRules()
    rules.learn([call(2.0, batch_size=64)], [[call(1.0, batch_size=64)], [call(3.0, batch_size=64)]], (1, 1), (2, 2))
    (one,) = rules.merge([call(1.0, 0, batch_size=64), call(3.0, 1, batch_size=64)], [(1.0, 2), (1.0, 2)])
    assert one.arguments["batch_size"] == 64


def test_metric_objects_are_passed_on() -> None:
    metric = MeanMetric()
    calls = [LogCall(part, "training_step", "m", metric, {}) for part in (0, 1)]
    LogRules().learn(calls[:1], [calls[:1], calls[:1]], (1, 1), (1, 1))
    (one,) = LogRules().merge(calls, [(1.0, 1), (1.0, 1)])
    assert one.value is metric


# --- values ---------------------------------------------------------------------------------------------------------


def test_parts_without_labels() -> None:
    parts = [(0.0, 2), (3.0, 1)]
    rules = LogRules()
    assert merged(rules, [math.nan, 2.0], parts) == 2.0  # the loss: 0/0
    assert merged(rules, [2.0, 1.0], parts, reduce_fx="sum") == 3.0  # samples: all of them
    assert merged(rules, [math.nan, 1.0], parts, reduce_fx="max") == 1.0
    assert merged(rules, [3.0, 5.0], [(0.0, 1), (0.0, 1)]) == 4.0
    assert math.isnan(merged(rules, [math.nan, math.nan], [(0.0, 1), (0.0, 1)]))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([torch.tensor(3), torch.tensor(5)], 4.0),
        ([torch.tensor(True), torch.tensor(False)], 0.5),
        ([torch.tensor([3.0]), torch.tensor(5.0)], 4.0),
        ([torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor(5.0)], 4.0),
        ([torch.tensor(3.0, dtype=torch.float64), torch.tensor(5)], 4.0),
    ],
)
def test_kinds_of_tensors(values: list[Tensor], expected: float) -> None:
    (one,) = LogRules().merge([call(value, part) for part, value in enumerate(values)], [(1.0, 1), (1.0, 1)])
    assert float(one.value) == expected
    assert one.value.ndim == 0
    assert one.value.dtype == (torch.float64 if values[0].dtype == torch.float64 else torch.float32)


# --- metric objects -------------------------------------------------------------------------------------------------


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.weighted = MeanMetric()
        self.never = MeanSquaredError()
        self.all = MetricCollection({"error": MeanSquaredError(), "cat": CatMetric()}, compute_groups=False)
        self.auroc = BinaryAUROC()
        self.wrapped = ClasswiseWrapper(BinaryAUROC())

    def step(self, values: Tensor) -> None:
        self.mean.update(values.mean())
        self.weighted.update(values.mean(), weight=len(values))
        self.all["error"].update(values, torch.zeros_like(values))
        self.all["cat"].update(values)
        self.auroc.update(values / 10, (values > 2).int())


def test_metrics_that_differ_are_named() -> None:
    values = torch.arange(1.0, 5.0)
    whole, parts = Measured(), Measured()
    whole.step(values)
    computed = metric_values(whole)
    assert set(computed) == {"mean", "weighted", "all.error", "all.cat", "auroc"}
    assert whole.mean._computed is None
    for part in values.split([1, 3]):
        parts.step(part)
    with pytest.warns(UserWarning, match=r"batch: 'mean'\. .*weight="):
        assert check_metrics(computed, metric_values(parts)) == ["mean"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_metrics(computed, metric_values(whole)) == []


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.running = RunningMean(window=3)
        self.total = RunningSum(window=2)
        self.bounds = MinMaxMetric(MeanSquaredError())
        self.unused = RunningMean(window=2)

    def step(self, values: Tensor) -> None:
        self.running(values.mean())
        self.total.update(values.sum())
        self.bounds.update(values, torch.zeros_like(values))


def test_windows_over_updates_are_named() -> None:
    values = torch.arange(1.0, 5.0)
    whole, parts = Wrapped(), Wrapped()
    whole.step(values)
    computed = metric_values(whole)
    assert set(computed) == {"running", "total", "bounds"}
    assert whole.bounds.max_val == -torch.inf
    for part in values.split([2, 2]):
        parts.step(part)
    with pytest.warns(UserWarning, match="batch: 'running', 'total'"):
        assert check_metrics(computed, metric_values(parts)) == ["running", "total"]
