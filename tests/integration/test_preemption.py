"""A second process that gets a real signal, anywhere in a run, leaves a checkpoint from which it goes on exactly."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import cli.fit  # noqa: F401  before processes are forked
from cli.main import main
from lightning_memfit import MemoryPrediction, MicroBatching, Preemption
from lightning_memfit.data.batched import EffectiveBatchSampler, ResumableLoader
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

STEPS = 6
DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))


class Told(LightningModule):
    """Sends its process a signal at a place of the run, once."""

    def __init__(self, place: str = "", number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.place, self.number = place, number
        self.layer = torch.nn.Linear(4, 1)

    def reach(self, place: str) -> None:
        if place == self.place and self.global_step == 2:
            self.place = ""
            os.kill(os.getpid(), self.number)

    def training_step(self, batch, batch_idx):
        self.reach("forward")
        loss = self.layer(batch[0]).square().mean()
        if loss.requires_grad:
            loss.register_hook(lambda _: self.reach("backward"))
        return loss

    def validation_step(self, batch, batch_idx):
        self.reach("validation")
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.reach("step")

    def on_save_checkpoint(self, checkpoint):
        self.reach("save")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train(module, *callbacks, path=None, rank=None, **options):
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    place = (1, 0) if rank is None else (2, rank)
    loader = ResumableLoader(DATA, EffectiveBatchSampler(DATA, 4, 1, *place, seed=7))
    options = {"max_steps": STEPS, "val_check_interval": 2, "limit_val_batches": 3, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(
        module,
        loader,
        DataLoader(DATA, batch_size=4),
        ckpt_path=path if path and path.exists() else None,
        weights_only=False,
    )
    return [parameter.detach().clone() for parameter in module.parameters()]


def saves(folder):
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(dirpath=folder / "usual", every_n_train_steps=2, save_top_k=-1)


def interrupted(folder: Path, place: str, number: int, *more) -> None:
    callbacks = [*more, saves(folder)] if place == "save" else list(more)
    preemption = Preemption(dirpath=str(folder))
    options = {"enable_checkpointing": True} if place == "save" else {}
    try:
        train(Told(place, number), *callbacks, preemption, **options)
    except SystemExit:
        raise AssertionError(f"ended with {preemption.error.exit_code}") from None


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("forward", signal.SIGTERM),
        ("backward", signal.SIGINT),
        ("step", signal.SIGUSR1),
        ("validation", signal.SIGTERM),
        ("save", signal.SIGTERM),
    ],
)
def test_the_run_ends_at_a_step_and_goes_on_exactly(tmp_path, place, number):
    (ended,) = run_ranks(lambda: interrupted(tmp_path, place, number), 1, tmp_path / "run")
    assert ended.error == f"AssertionError: ended with {128 + number}", ended.output
    (path,) = tmp_path.glob("preempted-*.ckpt")
    whole = train(Told())
    resumed = train(Told(), path=path)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert torch.load(path, weights_only=False)["global_step"] in (2, 3)


def on_two(folder: Path, path: Path | None = None) -> list[float]:
    """Train on this rank, the second of which gets a signal unless a run is resumed."""
    rank = int(os.environ["RANK"])
    module = Told("forward" if rank == 1 and path is None else "")
    preemption = Preemption(dirpath=str(folder))
    strategy = DDPStrategy(process_group_backend="gloo")
    try:
        weights = train(module, preemption, path=path, devices=2, strategy=strategy, rank=rank)
    except SystemExit:
        raise AssertionError(f"ended with {preemption.error.exit_code}") from None
    return [weight.tolist() for weight in weights]


def test_a_signal_for_one_of_two_ranks_ends_both(tmp_path):
    ended = run_ranks(on_two, 2, tmp_path / "run", tmp_path)
    assert [rank.error for rank in ended] == ["AssertionError: ended with 143"] * 2, ended[0].output + ended[1].output
    (path,) = tmp_path.glob("preempted-*.ckpt")
    whole = run_ranks(on_two, 2, tmp_path / "whole", tmp_path, tmp_path / "none")
    resumed = run_ranks(on_two, 2, tmp_path / "resumed", tmp_path, path)
    assert whole[0].result == resumed[0].result == resumed[1].result


def test_inside_the_search_for_a_size(tmp_path):
    """Trial steps take errors for their own; a signal waits for the first whole step."""

    class Probed(Told):
        def reach(self, place):
            if place == "forward" and self.place:
                self.place = ""
                os.kill(os.getpid(), self.number)

    def run():
        preemption = Preemption(dirpath=str(tmp_path))
        try:
            train(Probed("forward"), MicroBatching(limit_bytes=1 << 30), preemption)
        except SystemExit:
            raise AssertionError(f"ended with {preemption.error.exit_code}") from None

    (ended,) = run_ranks(run, 1, tmp_path / "run")
    assert "ended with 143" in ended.error, ended.output


def test_before_the_first_step_the_run_ends_at_once(tmp_path):
    """Here while the step is traced."""

    class Traced(Told):
        def configure_model(self):
            if self.place:
                self.place = ""
                os.kill(os.getpid(), self.number)

    def run():
        preemption = Preemption(dirpath=str(tmp_path))
        try:
            train(Traced("trace"), preemption, MemoryPrediction())
        except SystemExit:
            raise AssertionError(f"ended with {preemption.error.exit_code}") from None

    (ended,) = run_ranks(run, 1, tmp_path / "run")
    assert "ended with 143" in ended.error, ended.output
    assert list(tmp_path.glob("*.ckpt")) == []


def test_the_grace_time_is_an_end(tmp_path):
    def run():
        class Waits(Told):
            def training_step(self, batch, batch_idx):
                if self.global_step == 2:
                    os.kill(os.getpid(), self.number)
                    signal.pause()  # for the end of the grace time
                    signal.pause()
                return super().training_step(batch, batch_idx)

        preemption = Preemption(grace_seconds=0.5, dirpath=str(tmp_path))
        try:
            train(Waits(), preemption)
        except SystemExit:
            raise AssertionError(str(preemption.error)) from None

    (ended,) = run_ranks(run, 1, tmp_path / "run", seconds=60)
    assert "no step boundary came in time" in ended.error, ended.output


def test_a_save_that_has_begun_is_finished_whatever_the_grace_time(tmp_path):
    def run():
        class SavesSlowly(Told):
            def on_save_checkpoint(self, checkpoint):
                time.sleep(1.0)

        preemption = Preemption(grace_seconds=0.5, dirpath=str(tmp_path))
        try:
            train(SavesSlowly("forward"), preemption)
        except SystemExit:
            raise AssertionError(str(preemption.error)) from None

    (ended,) = run_ranks(run, 1, tmp_path / "run", seconds=60)
    assert "SIGTERM: saved" in ended.error, ended.output
    (path,) = tmp_path.glob("preempted-*.ckpt")
    assert torch.load(path, weights_only=False)["global_step"] == 3


def test_workers_of_a_loader_go_on_until_the_step_is_done(tmp_path):
    """Ctrl-C reaches every process of the terminal's group."""

    def run():
        os.setpgid(0, 0)

        class ToAll(Told):
            def reach(self, place):
                if place == self.place and self.global_step == 1:
                    self.place = ""
                    os.killpg(0, signal.SIGINT)

        preemption = Preemption(dirpath=str(tmp_path))
        trainer = quiet_trainer(preemption, max_steps=STEPS, accumulate_grad_batches=4, limit_val_batches=0)
        try:
            trainer.fit(ToAll("forward"), DataLoader(DATA, batch_size=1, num_workers=2, prefetch_factor=1))
        except SystemExit:
            raise AssertionError(str(preemption.error)) from None

    (ended,) = run_ranks(run, 1, tmp_path / "run", seconds=60)
    assert "SIGINT: saved" in ended.error, ended.output
    assert "the run ends without a new checkpoint" not in ended.output


def test_handlers_are_given_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    train(Told(), Preemption(dirpath=str(tmp_path)))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_the_command_ends_with_the_signals_code(tmp_path, monkeypatch):
    (tmp_path / "told.py").write_text(
        "import os, signal\n"
        "from lightning.pytorch import Callback\n"
        "class Tells(Callback):\n"
        "    def on_before_optimizer_step(self, trainer, *_):\n"
        "        if trainer.global_step == 1: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    from tests.fuzz import RECIPE

    trainer = {**RECIPE["trainer"], "callbacks": [{"class_path": "told.Tells"}], "max_steps": 8}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "trainer": trainer}))
    (ended,) = run_ranks(lambda: main(["fit", "--config", "recipe.yaml"]), 1, tmp_path / "run")
    assert ended.result == 143, ended.output
    assert [path.name for path in tmp_path.rglob("preempted-*.ckpt")] == ["preempted-step=2.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"grace_seconds": float("nan")}, "grace_seconds=nan"), ({"signals": ["SIGNOTHING"]}, "'SIGNOTHING' is unknown")],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Preemption(**arguments)
