"""A second process that gets a real signal, anywhere in a run, leaves a checkpoint from which it goes on exactly."""

import fcntl
import os
import signal
import termios
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, Subset, TensorDataset

import cli.fit  # noqa: F401  before processes are forked
from cli.main import main
from lightning_memfit import MemoryPrediction, Preemption, WholeSteps, strategies
from lightning_memfit.data.batched import EffectiveBatchSampler, ResumableLoader
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

STEPS = 6
DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(autouse=True)
def hangups_count():
    """As if these tests were not started by `nohup`, whose processes ignore them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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
    return ModelCheckpoint(dirpath=folder / "usual", every_n_train_steps=2, save_top_k=-1)


def interrupted(folder: Path, place: str, number: int, *more) -> None:
    callbacks = [*more, saves(folder)] if place == "save" else list(more)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which a shell may have taken from those in its background
    preemption = Preemption(grace_seconds=300, dirpath=str(folder))
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
        ("forward", signal.SIGHUP),
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


class Watched(Told):
    """Has what goes on from figures of validation, and random numbers."""

    def __init__(self, place: str = "", step: int = 0) -> None:
        super().__init__()
        self.wanted, self.step = place, step
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def reach(self, place: str) -> None:
        if place == self.wanted and self.global_step == self.step and not self.trainer.sanity_checking:
            self.wanted = ""
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_epoch_end(self):
        self.reach("end of validation")

    def on_train_epoch_end(self):
        self.reach("end of epoch")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def watched(folder: Path, place: str = "", step: int = 0, interval: float | int = 1.0, path: Path | None = None):
    """Train three epochs of six steps: how it ended, the validations that were seen, and what came of them."""
    seen: list[tuple[int, float]] = []

    def see(trainer, module):
        seen.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    stopping = EarlyStopping("val_loss", patience=99)
    best = ModelCheckpoint(dirpath=folder / "best", filename="{step}", monitor="val_loss", save_top_k=-1)
    preemption = Preemption(grace_seconds=300, dirpath=str(folder))
    callbacks = (LambdaCallback(on_validation_end=see), stopping, best, WholeSteps(), preemption)
    torch.manual_seed(0)
    module, data, code = Watched(place, step), Subset(DATA, range(24)), 0
    loader = ResumableLoader(data, EffectiveBatchSampler(data, 4, 1, 1, 0, seed=7))
    options = {"max_epochs": 3, "val_check_interval": interval, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(*callbacks, enable_checkpointing=True, **options)
    try:
        trainer.fit(module, loader, DataLoader(DATA, batch_size=16), ckpt_path=path)
    except SystemExit:
        code = preemption.error.exit_code
    rate = trainer.optimizers[0].param_groups[0]["lr"] if not code else None
    weights = [parameter.detach().tolist() for parameter in module.parameters()]
    saved = sorted((Path(name).name, float(value)) for name, value in best.best_k_models.items())
    return code, seen, (stopping.wait_count, rate, weights, saved)


@pytest.mark.parametrize(
    ("place", "step", "interval"),
    [
        ("forward", 8, 1.0),
        ("step", 11, 1.0),  # the last of an epoch, before its validation
        ("validation", 12, 1.0),
        ("end of validation", 12, 1.0),
        ("end of epoch", 12, 1.0),
        ("step", 5, 4),  # the last of an epoch that no validation follows
        ("end of epoch", 18, 1.0),
    ],
)
def test_what_watches_validation_sees_the_same(tmp_path, place, step, interval):
    """Early stopping, checkpoints by a metric, schedulers on a plateau, and dropout."""

    def alone(*arguments):
        (ended,) = run_ranks(watched, 1, tmp_path / "run", *arguments)
        assert not ended.error, ended.output
        return ended.result

    _, seen, end = alone(tmp_path / "whole", "", 0, interval)
    code, before, _ = alone(tmp_path / "cut", place, step, interval)
    assert code == 128 + signal.SIGTERM
    (path,) = (tmp_path / "cut").glob("preempted-*.ckpt")
    code, after, resumed = alone(tmp_path / "cut", "", 0, interval, path)
    assert (code, before + after, resumed) == (0, seen, end)


class OwnAverage(Callback):
    """Validates with a mean over steps, in a way of its own."""

    def __init__(self):
        self.mean, self.trained = None, []

    def on_train_batch_end(self, trainer, module, *_):
        now = [parameter.detach().clone() for parameter in module.parameters()]
        self.mean = [a.lerp(b, 0.1) for a, b in zip(self.mean or now, now, strict=True)]

    def on_validation_start(self, trainer, module):
        self.trained = [parameter.detach().clone() for parameter in module.parameters()]
        self._set(module, self.mean)

    def on_validation_end(self, trainer, module):
        self._set(module, self.trained)

    def _set(self, module, values):
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.data.copy_(value)

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


class ToldInside(Told):
    """Is told as by a signal, in this process."""

    def reach(self, place):
        if place == self.place and self.global_step == 2:
            self.place = ""
            (preemption,) = (one for one in self.trainer.callbacks if isinstance(one, Preemption))
            preemption._received = signal.SIGTERM


@pytest.mark.parametrize("average", [lambda: EMAWeightAveraging(decay=0.9), OwnAverage])
@pytest.mark.parametrize("place", ["step", "validation"])
def test_weights_of_a_validation_are_not_those_that_the_run_goes_on_from(tmp_path, place, average):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        train(ToldInside(place), average(), Preemption(dirpath=str(tmp_path)))
    signal.signal(signal.SIGINT, before)  # Lightning ignores it from then on
    (path,) = tmp_path.glob("preempted-*.ckpt")
    whole = train(Told(), average())
    resumed = train(Told(), average(), path=path)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


class Teaching(ToldInside):
    """Follows its weights in a hook of its own, which Lightning calls after those of callbacks."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("teacher", torch.zeros(1, 4))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + (self.layer.weight - self.teacher).square().sum()

    def on_train_batch_end(self, *_):
        self.teacher.lerp_(self.layer.weight.detach(), 0.5)


class OnPlateau(ToldInside):
    """Has a scheduler that looks at the loss of each step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "loss"}]


@pytest.mark.parametrize("interval", [2, 3])  # a validation comes before or after the step that is told
@pytest.mark.parametrize("kind", [Teaching, OnPlateau])
def test_the_last_step_is_whole(tmp_path, kind, interval):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        train(kind("forward"), Preemption(dirpath=str(tmp_path)), val_check_interval=interval)
    signal.signal(signal.SIGINT, before)
    (path,) = tmp_path.glob("preempted-*.ckpt")
    whole, resumed = (train(kind(), path=one, val_check_interval=interval) for one in (None, path))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("options", [{"limit_train_batches": 1, "val_check_interval": 1.0}, {"val_check_interval": 1}])
def test_a_run_that_validates_after_every_step_ends_at_one(tmp_path, options):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        train(ToldInside("forward"), Preemption(dirpath=str(tmp_path)), **options)
    signal.signal(signal.SIGINT, before)
    (path,) = tmp_path.glob("preempted-step=3.ckpt")
    whole, resumed = (train(Told(), path=one, **options) for one in (None, path))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_runs_that_share_a_folder_replace_none_of_each_other(tmp_path):
    for _ in range(2):
        (ended,) = run_ranks(lambda: interrupted(tmp_path, "forward", signal.SIGTERM), 1, tmp_path / "run")
        assert ended.error == "AssertionError: ended with 143", ended.output
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"preempted-step=3.ckpt", "preempted-step=3-v1.ckpt"}


STRATEGIES = {
    "ddp": ("DataParallelStrategy", {"process_group_backend": "gloo"}),
    "fsdp2": ("FullyShardedStrategy", {"process_group_backend": "gloo"}),
    "zero_2": ("ZeroStrategy", {"stage": 2}),
    "zero_3": ("ZeroStrategy", {"stage": 3}),
}


def on_two(
    folder: Path, names: list[str], number: int | None, resumes: bool = False
) -> dict[str, tuple[int, list[float]]]:
    """Train on this rank, the second of which gets a signal; how each strategy's run ended, and its weights."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    rank, found = os.environ["RANK"], {}
    for name in names:
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", NODE_RANK="0")
        kind, options = STRATEGIES[name]
        module = Told("forward" if rank == "1" and number else "", number or 0)
        preemption = Preemption(grace_seconds=300, dirpath=str(folder / name))
        path = next((folder / name).glob("preempted-*")) if resumes else None
        weights, code = [], 0
        try:
            strategy = getattr(strategies, kind)(**options)
            train(module, preemption, path=path, devices=2, strategy=strategy, rank=int(rank))
            weights = torch.cat([whole(parameter).flatten() for parameter in module.parameters()]).tolist()
        except SystemExit:
            code = preemption.error.exit_code
        found[name] = code, weights
    return found


def whole(parameter):
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


def test_a_signal_for_one_of_two_ranks_ends_both(tmp_path):
    names = [*STRATEGIES] if find_spec("deepspeed") else [*STRATEGIES][:2]
    runs = []
    for case, (number, resumes) in enumerate([(None, False), (signal.SIGTERM, False), (None, True)]):
        ended = run_ranks(on_two, 2, tmp_path / str(case), tmp_path, names, number, resumes, seconds=300)
        assert ended[0].result == ended[1].result != None, ended[0].output[-3000:] + ended[1].output[-3000:]  # noqa: E711
        runs.append(ended[0].result)
    undisturbed, stopped, resumed = runs
    assert {name: code for name, (code, _) in stopped.items()} == dict.fromkeys(names, 143)
    assert resumed == undisturbed


SCONTROL = """#!/bin/sh
echo "$@" >> "$SCONTROL_CALLS"
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_slurm_requeues_at_a_step(number, tmp_path, monkeypatch):
    """Lightning alone saves inside the signal's handler, in the middle of a forward pass, and loses that batch."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SCONTROL_CALLS", str(tmp_path / "calls"))
    for name, value in {"JOB_ID": "7", "NTASKS": "1", "JOB_NAME": "train", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    plugins = [] if number == signal.SIGUSR1 else [SLURMEnvironment(requeue_signal=number)]
    options = {"default_root_dir": tmp_path, "plugins": plugins}
    undisturbed = train(Told(), default_root_dir=tmp_path / "other")

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def run():
        signal.signal(number, signal.SIG_DFL)  # Lightning leaves a handler alone that an earlier test has left
        return train(Told("forward", number), Preemption(), **options)

    (ended,) = run_ranks(run, 1, tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, ended.result, strict=True)), ended.output
    assert (tmp_path / "calls").read_text() == "requeue 7\n"
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"] == 3
    begins = LambdaCallback(on_train_start=lambda trainer, _: print("begins at", trainer.global_step))
    (again,) = run_ranks(lambda: train(Told(), begins, Preemption(), **options), 1, tmp_path / "again")
    assert "begins at 3" in again.output
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, again.result, strict=True))


class Prints(Callback):
    def on_train_batch_end(self, *_):
        os.write(1, b"a progress bar\n")


def test_the_end_of_a_terminal(tmp_path):
    """The kernel sends SIGHUP, and what is then printed to the terminal is an error."""

    def run():
        output = os.dup(1)
        master, terminal = os.openpty()
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for stream in (1, 2):
            os.dup2(terminal, stream)
        os.close(terminal)

        class HangsUp(Told):
            def reach(self, place):
                if place == "forward" and self.global_step == 2:
                    os.close(master)

        preemption = Preemption(grace_seconds=300, dirpath=str(tmp_path))
        try:
            train(HangsUp(), Prints(), preemption)
        except SystemExit:
            raise AssertionError(str(preemption.error)) from None
        finally:
            os.dup2(output, 1)
            os.dup2(output, 2)

    (ended,) = run_ranks(run, 1, tmp_path / "run", seconds=60)
    assert "SIGHUP: saved" in ended.error, ended.error + ended.output


def test_signals_that_a_process_ignores_stay_ignored(tmp_path):
    """As those of `nohup`."""

    def run():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        train(Told("forward", signal.SIGHUP), Preemption(dirpath=str(tmp_path)))
        return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    (ended,) = run_ranks(run, 1, tmp_path / "run", seconds=60)
    assert ended.result is True, ended.output


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
                    time.sleep(60)  # which the end of the grace time interrupts
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
        signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_command_ends_with_the_signals_code(number, tmp_path, monkeypatch):
    (tmp_path / "told.py").write_text(
        "import os, signal\n"
        "from lightning.pytorch import Callback\n"
        "class Tells(Callback):\n"
        "    def on_before_optimizer_step(self, trainer, *_):\n"
        "        if trainer.global_step == 1: os.kill(os.getpid(), int(os.environ['NUMBER']))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUMBER", str(int(number)))
    from tests.fuzz import RECIPE

    trainer = {**RECIPE["trainer"], "callbacks": [{"class_path": "told.Tells"}], "max_steps": 8}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "trainer": trainer}))
    (ended,) = run_ranks(lambda: main(["fit", "--config", "recipe.yaml"]), 1, tmp_path / "run")
    assert ended.result == 128 + number, ended.output
    assert [path.name for path in tmp_path.rglob("preempted-*.ckpt")] == ["preempted-step=2.ckpt"]
