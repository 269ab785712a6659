"""A trace calls the hooks of a step, and of those around training the ones it needs."""

from collections import Counter
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.size.prediction import MemoryPrediction
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.hooks import changes_steps
from lightning_memfit.profile.trace import Emulation
from tests.helpers.trainers import fit
from tests.truth.profile.modules import Classifier, batch, peak, true_peak

AROUND = (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
)


class Watched(Classifier):
    """Counts its hooks where copies of it count, too: in the class and in a file."""

    calls: ClassVar[Counter] = Counter()
    path = None

    def arrived(self, name):
        Watched.calls[name] += 1
        with open(Watched.path, "a") as file:
            file.write(f"{name}\n")

    def prepare_data(self):
        self.arrived("prepare_data")

    def setup(self, stage):
        self.arrived("setup")

    def on_fit_start(self):
        type(self).calls["on_fit_start"] += 1

    def on_train_start(self):
        Watched.calls["on_train_start"] += 1

    def on_train_epoch_start(self):
        self.calls["on_train_epoch_start"] += 1

    def on_train_epoch_end(self):
        self.net[0].weight.data.add_(0.0)
        self.arrived("on_train_epoch_end")

    def on_train_end(self):
        self.arrived("on_train_end")

    def on_fit_end(self):
        self.arrived("on_fit_end")

    def on_validation_epoch_end(self):
        self.arrived("on_validation_epoch_end")

    def teardown(self, stage):
        self.arrived("teardown")

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    monkeypatch.setattr(Watched, "calls", Counter())
    monkeypatch.setattr(Watched, "path", tmp_path / "calls.txt")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    return Watched()


def test_no_hook_around_training_is_called_in_a_trace_or_measurement(watched):
    profile_module(watched, batch())
    measure_step(watched, batch())
    assert not Watched.calls
    assert not Watched.path.exists()


def test_a_run_with_predictions_calls_every_hook_once(watched):
    loader = torch.utils.data.DataLoader([{k: v[0] for k, v in batch().items()}] * 4, 4)
    fit(watched, MicroBatching(limit_bytes=1 << 24), MemoryPrediction(), loader=loader, max_epochs=1)
    assert {name: Watched.calls[name] for name in (*AROUND, "prepare_data")} == dict.fromkeys(
        (*AROUND, "prepare_data"), 1
    )


class Freezes(Classifier):
    def on_fit_start(self):
        self.net.requires_grad_(False)


class FreezesByMethod(Classifier):
    def on_train_start(self):
        self.quiet()

    def quiet(self):
        for parameter in self.parameters():
            parameter.requires_grad = False


class SetsAFlag(Classifier):
    twice = False

    def setup(self, stage):
        self.twice = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.loss({"x": batch["x"] * 2, "y": batch["y"]}) if self.twice else loss


class HandsItselfOn(Classifier):
    def on_fit_start(self):
        freeze(self)


class Inherits(Freezes):
    def on_fit_start(self):
        super().on_fit_start()


def freeze(module):
    module.net.requires_grad_(False)


class Replaces(Classifier):
    def setup(self, stage):
        self.head = nn.Sequential(self.head, nn.Identity())


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        (Freezes, "on_fit_start"),
        (FreezesByMethod, "on_train_start"),
        (SetsAFlag, "setup"),
        (HandsItselfOn, "on_fit_start"),
        (Inherits, "on_fit_start"),
        (Replaces, "setup"),
    ],
)
def test_hooks_that_may_change_the_step_are_called(kind, hook):
    assert changes_steps(kind(), hook)


@pytest.mark.parametrize("kind", [Freezes, SetsAFlag])
def test_their_changes_count(kind):
    plain, changed = (profile_module(c(), batch(), any_micro_batch=False) for c in (Classifier, kind))
    assert plain.events.live_bytes().max() != changed.events.live_bytes().max()


class NeedsWhatCantBeSeen(Classifier):
    def on_train_start(self):
        vars(globals()["CURRENT"][-1])  # not read as a change
        MADE["factor"] = 2.0

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * MADE["factor"]


MADE: dict = {}
CURRENT = [nn.Identity()]


def test_a_step_that_fails_without_them_is_tried_with_them():
    assert not changes_steps(NeedsWhatCantBeSeen(), "on_train_start")
    for run in (profile_module, measure_step):
        MADE.clear()
        assert run(NeedsWhatCantBeSeen(), batch()).events.live_bytes().max() > 0


def test_clones_are_changed_and_modules_are_not(watched):
    profile_module(watched, batch(), any_micro_batch=False)
    assert not set(AROUND) & set(vars(watched))
    assert isinstance(watched, pl.LightningModule)


class MakesATable(Classifier):
    def setup(self, stage):
        self.table = torch.randn(4000, 64)


class MakesItByAFunction(Classifier):
    def on_fit_start(self):
        self.tables = [make_table()]


class MakesItEveryEpoch(Classifier):
    def on_train_epoch_start(self):
        self.table = torch.zeros(4000, 64)


def make_table():
    return torch.randn(4000, 64)


@pytest.mark.parametrize("kind", [MakesATable, MakesItByAFunction, MakesItEveryEpoch])
def test_tensors_that_a_hook_makes_count(kind):
    truth = true_peak(kind, batch, 3, max_epochs=2)
    traced = profile_module(kind(), batch(), emulation=Emulation("cpu"), any_micro_batch=False)
    for profile in (traced, measure_step(kind(), batch())):
        assert peak(profile.events) == pytest.approx(truth, rel=1e-3)


class MakesAFile(MakesATable):
    def setup(self, stage):
        super().setup(stage)
        torch.save(self.table, "table.pt")


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_a_hook_that_makes_tensors_and_can_not_run_is_named(profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "`setup`" in profile(MakesAFile(), batch()).cautions[0]
    assert not list(tmp_path.iterdir())
