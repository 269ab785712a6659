"""Predictions made inside a Trainer, before anything is allocated for the run."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.finder import run as finder
from benchmarks.finder.models import CURVED
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.estimate.division import Division
from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.size import prediction
from lightning_memfit.fitting.size.prediction import MemoryPrediction
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.memory import Category
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from tests.helpers.modules import Layers
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import difference, fit, quiet_trainer

WIDTH = 64


class Wide(pl.LightningModule):
    """Blocks whose activations outweigh everything else; draws random numbers in its data and its dropout."""

    def __init__(self, value_dependent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 1)
        self.value_dependent = value_dependent
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        if self.value_dependent:
            x = torch.cat([x[x[:, 0] > 0], x[x[:, 0] <= 0]])
        loss = self.head(self.dropout(x)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(2048, WIDTH)), 1024, shuffle=True)


def test_the_memory_model_names_the_size_and_two_steps_confirm_it() -> None:
    callback = MicroBatching()
    module = Wide()
    fit(module, MemoryLimit("1MiB"), callback, max_epochs=2)
    found = callback.found
    assert found is not None
    assert (found.is_done, found.num_steps, found.num_failed) == (True, 2, 0)
    assert 1 < found.tried <= found.largest < 1024


@pytest.mark.nightly
def test_the_run_is_bitwise_the_run_with_that_size_given() -> None:
    auto, by_hand = Wide(), Wide()
    callback = MicroBatching()
    torch.manual_seed(7)
    fit(auto, MemoryLimit("1MiB"), callback, max_epochs=1)
    torch.manual_seed(7)
    fit(by_hand, MemoryLimit("1MiB"), MicroBatching(micro_batch_size=callback.micro_batch_size_in_use), max_epochs=1)
    assert auto.losses == by_hand.losses
    assert difference(auto, by_hand) == 0.0


def test_without_a_trace_the_size_grows_in_the_first_steps() -> None:
    callback = MicroBatching()
    fit(Wide(value_dependent=True), MemoryLimit("1MiB"), callback, max_epochs=2)
    assert callback.found is not None
    assert callback.found.largest > 2


@pytest.mark.nightly
def test_predicting_keeps_no_batch_on_the_device() -> None:
    callback, limit = MicroBatching(), MemoryLimit("1MiB")
    live: list[int] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, *_: object) -> None:
            assert limit.ledger is not None
            live.append(limit.ledger.live_by_category[Category.INPUT])

    fit(Wide(), limit, callback, Watch(), max_epochs=2)
    assert callback.found is not None
    assert live[0] == 1024 * WIDTH * 4
    assert len(set(live)) == 1


# --- memory that is not linear in the batch -------------------------------------------------------------------------


def searched(name: str, monkeypatch: pytest.MonkeyPatch, steps: int = 4) -> dict[str, Any]:
    monkeypatch.setattr(finder, "LATER_STEPS", steps)
    search = finder.Search(next(case for case in CURVED if case.name == name), finder.OURS)
    row = finder.run(search)
    assert row["later_errors"] == 0
    assert row["errors"] <= 1
    assert row["tried"]
    return row | finder.hold(search, None, row)


@pytest.mark.nightly
@pytest.mark.nightly_cases("distances", "padded")
@pytest.mark.parametrize(
    "name",
    [
        "all pairs",
        "padded to 16",
        "attention over the batch",
        "distances",
    ],
)
def test_a_step_of_any_curve_is_traced_where_it_matters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = searched(name, monkeypatch)
    assert 0.97 <= row["fraction"] <= 1
    assert row["steps"] <= 3


@pytest.mark.nightly_cases("values choose")
@pytest.mark.parametrize("name", ["values choose, attention", "through C"])
def test_a_step_that_cannot_be_traced_is_found_in_eight_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = searched(name, monkeypatch)
    assert 0.75 <= row["fraction"] <= 1  # of sizes with as many micro-batches the one that divides best
    assert row["steps"] <= 8


@pytest.mark.nightly
def test_longer_batches_get_a_smaller_size_before_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    row = searched("recurrent, then longer", monkeypatch)
    assert 0.97 <= row["fraction"] <= 1
    true = row["true_maximum_of_second_batch"]
    assert min(0.97 * true, true - 1) <= row["size_of_second_batch"] <= true


@pytest.mark.parametrize("techniques_first", [True, False])
def test_prediction_reaches_the_monitor_and_is_right(techniques_first: bool) -> None:
    monitor, prediction, technique = MemoryMonitor(), MemoryPrediction(), ActivationCheckpointing()
    callbacks = [technique, prediction] if techniques_first else [prediction, technique]
    fit(Wide(), monitor, *callbacks, max_epochs=2)
    assert prediction.estimate is not None
    assert monitor.predicted == prediction.estimate.breakdown
    assert monitor.report is not None
    assert monitor.report.prediction_error == pytest.approx(0.0, abs=0.01)


def test_prediction_changes_nothing() -> None:
    plain, predicted = Wide(), Wide()
    torch.manual_seed(7)
    fit(plain, max_epochs=1)
    torch.manual_seed(7)
    fit(predicted, MemoryPrediction(), max_epochs=1)
    assert plain.losses == predicted.losses
    assert difference(plain, predicted) == 0.0


def test_no_prediction_says_why() -> None:
    prediction = MemoryPrediction()
    trainer = quiet_trainer(prediction, max_epochs=1)
    with pytest.warns(UserWarning, match="depends on values of tensors"):
        trainer.fit(Wide(value_dependent=True))
    assert prediction.estimate is None


class ReachesItself(Wide):
    """Computes by what a class attribute holds."""

    made: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made[:] = [self]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.head(nn.Sequential(*self.made[0].blocks)(batch[0])).square().mean()


def test_a_module_that_is_reached_past_self_is_predicted_and_stays_as_it_is() -> None:
    prediction, module = MemoryPrediction(), ReachesItself()
    weights = [weight.detach().clone() for weight in module.parameters()]
    fit(module, prediction, max_epochs=1)
    assert prediction.estimate is not None
    assert not any(torch.equal(*pair) for pair in zip(weights, module.parameters(), strict=True))


@pytest.mark.parametrize("prediction_first", [True, False])
def test_the_prediction_is_for_the_size_that_was_chosen(prediction_first: bool) -> None:
    monitor, chooser = MemoryMonitor(), MicroBatching()
    # With the prediction first, that of the loader's whole batch is replaced once the size is known.
    callbacks = [MemoryPrediction(), chooser] if prediction_first else [chooser, MemoryPrediction()]
    fit(Wide(), MemoryLimit("1MiB"), monitor, *callbacks, max_epochs=1)
    assert monitor.report is not None
    assert monitor.report.prediction_error == pytest.approx(0.0, abs=0.05)


def test_the_prediction_for_one_micro_batch_knows_that_gradients_are_cleared_before_backward() -> None:
    monitor, chooser = MemoryMonitor(), MicroBatching()
    fit(Wide(), MemoryLimit("8MiB"), monitor, chooser, max_epochs=2)
    assert chooser.micro_batch_size_in_use == 1024
    assert monitor.report is not None
    assert monitor.report.prediction_error == pytest.approx(0.0, abs=0.01)  # gradients weigh 3 %


def test_on_several_ranks_it_says_where_the_figure_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(prediction, "rank_zero_info", told.append)
    callback, module = MemoryPrediction(), Wide()
    trainer = quiet_trainer(callback)
    monkeypatch.setattr(type(trainer), "world_size", 2)
    callback.setup(trainer, module, "fit")
    assert callback.estimate is None
    assert "as it has 2 ranks. `memfit estimate" in told[0]


@pytest.mark.parametrize("fits_itself", [False, True])
def test_what_a_strategy_divides_is_not_said_to_be_on_one_device(
    fits_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 on one device: its trace isn't one of a plain step."""
    monitor, callback = MemoryMonitor(), MicroBatching() if fits_itself else MemoryPrediction()
    trainer = quiet_trainer(callback, monitor, MemoryLimit("64MiB"))
    trainer.strategy.connect(Wide())
    monkeypatch.setattr(prediction, "division_of", lambda *_: Division("memfit_fsdp2", 3, 1, 1))
    assert prediction.is_divided(trainer)
    trainer.fit(Wide())
    assert monitor.report is not None
    assert monitor.report.predicted is None


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_deepspeed_on_one_device_is_predicted_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (ended,) = run_ranks(_error_under_zero, 1, tmp_path)
    assert ended.error == ""
    assert ended.result == pytest.approx(0.0, abs=0.01)


def _error_under_zero() -> float | None:
    from lightning_memfit.strategies import ZeroStrategy

    monitor, module = MemoryMonitor(), Layers(*[256] * 9)
    data = DataLoader(torch.randn(8, 256), 4)
    trainer = quiet_trainer(
        MemoryPrediction(), monitor, strategy=ZeroStrategy(stage=2), precision="bf16-mixed", max_steps=4
    )
    trainer.fit(module, data)
    assert monitor.report is not None
    return monitor.report.prediction_error
