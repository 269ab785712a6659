"""Metric objects and logged values of a batch that runs in parts, beside those of plain Lightning."""

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.wrappers import Running

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.recovery.rollback import MetricStates
from lightning_memfit.fitting.step.outputs import LogCall, StepLogs, StepOutputs, differing, merge_logs
from tests.helpers.trainers import fit


class Results(_ResultCollection):
    """Lightning's collection; keeps what reaches it."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self.logged: list[tuple[str, float, int]] = []
        self.full = 0

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.full += 1
        super().log(*args, **kwargs)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self.logged.append((key, float(value), batch_size))
        super().update_metrics(key, value, batch_size)


# --- logged values --------------------------------------------------------------------------------------------------


def test_one_micro_batch_logs_what_it_logged() -> None:
    results, logs = Results(), StepLogs()
    value = torch.tensor(1.0)
    logs.begin_part(1.0, 4)
    with logs.capture(results):
        results.log("training_step", "x", value, batch_size=4)
        results.log("training_step", "x", value, batch_size=4)
    assert not results.logged
    logs.commit(results)
    assert results.logged == [("training_step.x", 1.0, 4)] * 2
    assert not logs.calls


def test_a_failed_attempt_logs_nothing() -> None:
    results, outputs = Results(), StepOutputs(nn.Module(), Results())
    outputs._results = results
    outputs.begin(2)
    outputs.logs.begin_part(1.0, 1)
    results.log("training_step", "x", torch.tensor(1.0))
    outputs.end()
    outputs.clear()
    outputs.begin(1)
    outputs.logs.begin_part(1.0, 2)
    results.log("training_step", "x", torch.tensor(5.0))
    outputs.end()
    outputs.commit()
    assert results.logged == [("training_step.x", 5.0, 1)]


def test_what_lightning_knows_is_not_registered_again() -> None:
    results, other, logs = Results(), Results(), StepLogs()

    def log(into: Results, value: float, **arguments: Any) -> None:
        with logs.capture(into):
            into.log("training_step", "x", torch.tensor(value), **arguments)
        logs.commit(into)

    for value in (1.0, 2.0, 6.0):
        log(results, value, on_step=True, batch_size=int(value))
    assert results.full == 1
    assert results.logged == [("training_step.x", value, int(value)) for value in (1.0, 2.0, 6.0)]
    assert float(results["training_step.x"].compute()) == pytest.approx(41 / 9)
    assert float(results.metrics(on_step=True)["log"]["x_step"]) == 6.0
    results.reset()
    results.batch = torch.zeros(7, 2)
    log(results, 3.0, on_step=True)
    assert results.full == 1
    assert results.logged[-1] == ("training_step.x", 3.0, 7)
    log(other, 3.0, on_step=True)  # another collection
    assert other.full == 1
    results.clear()
    log(results, 3.0, on_step=True)
    assert results.full == 2
    with pytest.raises(MisconfigurationException, match="twice in `training_step` with different arguments"):
        log(results, 3.0, on_step=False)
    results.dataloader_idx = 0
    log(results, 3.0, on_step=False)
    assert results.full == 4


PARTS = [(30.0, 3), (10.0, 2)]
"""Tokens and samples of two micro-batches."""


def calls(values: list[float], name: str = "value", **arguments: Any) -> list[LogCall]:
    return [LogCall(part, "training_step", name, torch.tensor(one), arguments) for part, one in enumerate(values)]


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("sum", 6.0), ("max", 4.0), (torch.min, 2.0), ("mean", 2.5), (torch.mean, 2.5)]
)
def test_reductions_are_those_that_are_asked_for(reduce_fx: Any, expected: float) -> None:
    (merged,) = merge_logs(calls([2.0, 4.0], reduce_fx=reduce_fx), PARTS)
    assert float(merged.value) == pytest.approx(expected)


@pytest.mark.parametrize(("sizes", "expected"), [((1, 7), 30 / 8), ((5, 5), 2.5), ((3, 2), 2.5)])
def test_a_batch_size_that_was_chosen_weighs_and_adds_up(sizes: tuple[int, int], expected: float) -> None:
    """One that is the same in every part, or the number of samples, was not chosen for the value."""
    values = zip((2.0, 4.0), sizes, strict=True)
    both = [LogCall(p, "f", "n", torch.tensor(v), {"batch_size": b}) for p, (v, b) in enumerate(values)]
    (merged,) = merge_logs(both, PARTS)
    assert float(merged.value) == pytest.approx(expected)
    assert merged.arguments["batch_size"] == sum(sizes)


def test_a_micro_batch_without_labels_has_no_share() -> None:
    (merged,) = merge_logs(calls([3.0, float("nan")]), [(5.0, 3), (0.0, 2)])
    assert float(merged.value) == 3.0


@pytest.mark.parametrize(
    ("whole", "parts", "names"),
    [
        (calls([2.5]), calls([2.0, 4.0]), []),
        (calls([2.6], "perplexity"), calls([2.0, 4.0], "perplexity"), ["perplexity"]),
        (calls([1e-9]), calls([2.0, -6.0]), []),  # rounding of what cancels
        (calls([1.0]), [], ["value"]),
        ([LogCall(0, "f", "m", MeanSquaredError(), {"on_step": True})] * 1, [], ["m"]),
    ],
)
def test_values_that_parts_do_not_make_are_named(whole: list[LogCall], parts: list[LogCall], names: list[str]) -> None:
    assert differing(whole, parts, PARTS, 1e-6) == names


# --- metric objects -------------------------------------------------------------------------------------------------


class Attributed(Metric):
    """Keeps graphs in places of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.last: dict[str, Any] = {}

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.last = {"preds": [preds]}
        self.total = self.total + (preds - target).abs().sum()

    def compute(self) -> Tensor:
        return self.total


class Concatenated(CatMetric):
    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds)

    def compute(self) -> Tensor:
        return torch.as_tensor(super().compute()).square().mean()


def composition() -> Metric:
    error = MeanSquaredError()
    return error + 2 * Attributed() / error


METRICS: dict[str, Callable[[], Metric]] = {
    "tensor state": MeanSquaredError,
    "list state": Concatenated,
    "composition": composition,
    "window": lambda: Running(MeanSquaredError(), window=2),
}


class Logging(pl.LightningModule):
    """Logs a metric of predictions with their graph."""

    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.metric = metric
        self.step_values: list[dict[str, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        preds, target = self.net(batch[0])[:, 0], batch[1]
        self.metric(preds, target)
        if isinstance(self.metric, MetricCollection):
            self.log_dict(self.metric, on_step=True, on_epoch=True)
        else:
            self.log("metric", self.metric, on_step=True, on_epoch=True)
        return nn.functional.mse_loss(preds, target)

    def on_train_batch_end(self, *_: Any) -> None:
        self.step_values.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        data = TensorDataset(torch.randn(20, 3, generator=generator), torch.randn(20, generator=generator))
        return DataLoader(data, 8)


METRIC_NAMES = ("metric", "mse", "own")
"""Of what metric objects log, the values of the epoch alone are those of the whole batch."""


def assert_as_plain(make: Callable[[], pl.LightningModule], size: int = 3, **kwargs: Any) -> None:
    """Values of the epoch, and of steps but for metric objects, are those of plain Lightning."""
    plain, ours = make(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = fit(plain, **kwargs).callback_metrics
        found = fit(ours, MicroBatching(micro_batch_size=size), **kwargs).callback_metrics
    assert expected
    assert set(found) == set(expected)
    for name, value in expected.items():
        if name.startswith(METRIC_NAMES) and not name.endswith("_epoch"):
            continue
        assert float(found[name]) == pytest.approx(float(value), rel=1e-4), name
    for step, wanted in zip(ours.step_values, plain.step_values, strict=True):
        of_metrics = {name for name in wanted if name.startswith(METRIC_NAMES)}
        for name in wanted.keys() - of_metrics:
            assert step[name] == pytest.approx(wanted[name], rel=1e-4), name


@pytest.mark.parametrize("kind", ["tensor state", "list state", "composition"])
def test_metrics_of_predictions_with_a_graph(kind: str) -> None:
    torch.manual_seed(1)
    metric = METRICS[kind]()
    assert_as_plain(lambda: Logging(deepcopy(metric)))


def test_collections_of_metrics() -> None:
    def make() -> Logging:
        return Logging(MetricCollection({"mse": MeanSquaredError(), "own": Attributed()}))

    assert_as_plain(make)


class Ranks(pl.LightningModule):
    """Counts two kinds of hits, which are equal in the first samples, and two metrics with one kind of state."""

    def __init__(self, is_hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 5)
        hits = {f"top{k}": MulticlassAccuracy(5, top_k=k, average="micro") for k in (1, 4)}
        made = MetricCollection({**hits, "one": MulticlassConfusionMatrix(5), "other": MulticlassConfusionMatrix(5)})
        self.kept = [made] if is_hidden else nn.ModuleList([made])
        self.seen: list[dict[str, Any]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self.net(batch[0])
        self.kept[0].update(scores, batch[1])
        return nn.functional.cross_entropy(scores, batch[1])

    def on_train_epoch_end(self) -> None:
        assert len(self.kept[0].compute_groups) == 3
        self.seen.append({name: value.tolist() for name, value in self.kept[0].compute().items()})
        self.kept[0].reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, torch.arange(24) % 5), 12)


@pytest.mark.parametrize(("is_hidden", "size"), [(False, 4), (True, 1)])
def test_collections_group_their_metrics_by_the_whole_batch(is_hidden: bool, size: int) -> None:
    plain, ours = Ranks(is_hidden), Ranks(is_hidden)
    fit(plain)
    fit(ours, MicroBatching(micro_batch_size=size))
    assert ours.seen == plain.seen


@pytest.mark.parametrize("kind", METRICS)
def test_states_of_metrics_go_back(kind: str) -> None:
    module = nn.ModuleDict({"metric": METRICS[kind]()})
    metric, states = module["metric"], MetricStates(module)
    leaf = torch.randn(4, requires_grad=True)
    values = []
    for _ in range(3):
        metric(leaf * 2.0, torch.arange(4.0))
        saved = states.save()
        assert not any(tensor.requires_grad for state in saved for tensor in flat(state))
        values.append(metric.compute())
        for _ in range(2):
            metric(leaf * 3.0, torch.arange(4.0))
        states.load(saved)
        assert torch.equal(metric.compute(), values[-1])


def flat(state: dict[str, Any]) -> Iterator[Tensor]:
    for value in state.values():
        yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Tensor))
