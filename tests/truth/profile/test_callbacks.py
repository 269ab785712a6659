"""Callbacks that act in a step are part of a trace, and the others are not."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from typing_extensions import override

from lightning_memfit import MemoryMonitor
from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.memory import Category
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.callbacks import acting_callbacks, acts_in_step
from lightning_memfit.profile.trace import Emulation
from tests.truth.profile.modules import Classifier, Stack, batch, peak, true_peak


class KeepsAverage(pl.Callback):
    """An average of the weights by hand."""

    def __init__(self) -> None:
        self.average: Any = None
        self.model: Any = None

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.model = pl_module
        self.average = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name].lerp_(value, 0.1)


class KeepsOutputs(pl.Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *rest: Any) -> None:
        self.outputs = [*self.outputs[-1:], batch["x"].repeat(40, 1)]


class Writes(KeepsAverage):
    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        Path("losses.txt").write_text("x")


class WritesAtEnd(KeepsAverage):
    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(self.average, "average.pt")


class Fails(pl.Callback):
    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        raise ValueError("no server")


def attached(callbacks: list[Any], module: Any = None) -> Any:
    module = module or Classifier()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )
    module._trainer = trainer
    return module


@pytest.mark.parametrize(
    ("callback", "acts"),
    [
        (EMAWeightAveraging(), True),
        (StochasticWeightAveraging(swa_lrs=0.1), True),
        (KeepsAverage(), True),
        (KeepsOutputs(), True),
        (ModelCheckpoint(), False),
        (LearningRateMonitor(), False),
        (EarlyStopping("loss"), False),
        (TQDMProgressBar(), False),
        (ModelSummary(), False),
        (Timer(), False),
        (pl.Callback(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_callbacks_act(callback: Any, acts: bool) -> None:
    assert acts_in_step(callback) is acts


def keeps_outputs() -> Any:
    """Keeps an output by a hook that is set on the callback, as `LambdaCallback` does."""
    kept: list[Any] = []

    def keep(trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        kept[:] = [*kept[-1:], batch["x"].repeat(40, 1)]

    return LambdaCallback(on_train_batch_end=keep)


def test_hooks_set_on_a_callback_are_like_those_of_its_class() -> None:
    assert acts_in_step(keeps_outputs())
    assert acts_in_step(LambdaCallback(on_before_zero_grad=lambda *_: None))
    assert not acts_in_step(LambdaCallback(on_train_end=lambda *_: None))
    traced = profile_module(attached([keeps_outputs()]), batch(), emulation=Emulation("cpu"))
    by_class = profile_module(attached([KeepsOutputs()]), batch(), emulation=Emulation("cpu"))
    assert not traced.remarks
    assert peak(traced.events) == peak(by_class.events)


def test_own_callbacks_and_usual_ones_are_left_out() -> None:
    module = attached([MemoryMonitor(), ModelCheckpoint(), LearningRateMonitor(), Timer()])
    assert acting_callbacks(module) == ()


@pytest.mark.nightly_cases("Keeps")
@pytest.mark.parametrize("kind", [EMAWeightAveraging, KeepsAverage, KeepsOutputs])
def test_what_a_callback_needs_is_in_the_figures(kind: Any) -> None:
    torch.manual_seed(0)
    alone = peak(profile_module(Classifier(), batch(), emulation=Emulation("cpu")).events)
    traced = profile_module(attached([kind()]), batch(), emulation=Emulation("cpu"))
    measured = measure_step(attached([kind()]), batch())
    assert not traced.remarks
    assert peak(traced.events) > 1.1 * alone
    assert peak(traced.events) == pytest.approx(peak(measured.events), rel=1e-3)
    assert peak(traced.events) == pytest.approx(true_peak(Classifier, batch, 5, callbacks=[kind()]), rel=0.02)


@pytest.mark.nightly
def test_what_is_made_for_every_block_is_not_taken_for_one() -> None:
    data = torch.zeros(4, 16)
    profiles = [
        profile_module(attached([KeepsAverage()], Stack()), data, emulation=Emulation("cpu"), shorten=shorten)
        for shorten in (True, False)
    ]
    assert peak(profiles[0].events) == peak(profiles[1].events)


@pytest.mark.parametrize("profile", [profile_module, measure_step])
@pytest.mark.parametrize(("kind", "words"), [(Writes, "losses.txt"), (Fails, "no server")])
def test_callback_that_can_not_run_is_named(
    profile: Any, kind: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = profile(attached([kind(), KeepsOutputs()]), batch())
    assert len(found.remarks) == 1
    assert kind.__name__ in found.remarks[0]
    assert words in found.remarks[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_hooks_after_training_are_left_out(profile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Saves(Classifier):
        @override
        def on_train_end(self) -> None:
            torch.save(self.state_dict(), "weights.pt")

    monkeypatch.chdir(tmp_path)
    found = profile(attached([WritesAtEnd()], Saves()), batch())
    assert not found.remarks
    assert not list(tmp_path.iterdir())


def test_any_micro_batch_is_known_with_a_callback() -> None:
    assert profile_module(attached([EMAWeightAveraging()]), batch()).knows_every_size


def test_an_average_made_before_training_counts_as_buffers():
    def breakdown(callbacks):
        profile = profile_module(attached(callbacks), batch(), emulation=Emulation("cpu"), any_micro_batch=False)
        return {category: size for (_, category), size in estimate_step(profile).breakdown.entries.items()}

    plain, averaged = breakdown([]), breakdown([EMAWeightAveraging()])
    weights = sum(parameter.nbytes for parameter in attached([]).parameters())
    assert averaged[Category.BUFFER] - plain.get(Category.BUFFER, 0) == pytest.approx(
        weights, abs=64
    )  # and a count of updates
