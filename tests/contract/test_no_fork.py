"""Where a process can't be forked for traces, as on CUDA, a new one traces, or training goes on without."""

import os
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.fitting import auto
from lightning_memfit.fitting.auto import MemFit
from lightning_memfit.fitting.size.prediction import MemoryPrediction
from lightning_memfit.fitting.step.callback import MicroBatching
from lightning_memfit.profile import process
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.trace import Emulation, TraceError
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.core.first_batch import batches_per_epoch, first_batch
from tests.contract.runs import trainer
from tests.truth.profile.modules import Stack

ROOT = Path(__file__).parents[2]


class Unpicklable(Stack):
    """Can't be sent to a new process."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = lambda loss: loss


def samples() -> DataLoader[Any]:
    return DataLoader(torch.rand(128, 16), batch_size=64)


@pytest.fixture
def no_fork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a process that uses CUDA: forks read data only."""
    monkeypatch.setattr(process, "can_fork", lambda backward=True: not backward)
    monkeypatch.setattr(auto, "rates_of", cache(auto.rates_of))  # a busy CPU measures other rates, and plans by them
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))


def train(module: Any, callback: Any, *others: Any) -> list[str]:
    """Warnings of a run with a callback."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer([*others, callback], max_steps=2).fit(module, samples())
    return [str(one.message) for one in caught if "process" in str(one.message)]


def found_by(callback: Any) -> Any:
    """What a callback has made of its traces."""
    if isinstance(callback, MemFit):
        return callback.plan.setting, callback.plan.peak_bytes
    if isinstance(callback, MicroBatching):
        return callback.found.largest, callback.found.predicted_bytes
    if isinstance(callback, ActivationCheckpointing):
        return callback.resolved
    return callback.estimate


CALLBACKS = {
    "MemFit": lambda: (MemFit(), MemoryLimit("64MiB")),
    "MicroBatching": lambda: (MicroBatching(), MemoryLimit("256KiB")),
    "budget": lambda: (ActivationCheckpointing(budget="70%"),),
    "MemoryPrediction": lambda: (MemoryPrediction(),),
}


@pytest.mark.nightly_cases("MemFit", "MicroBatching", "budget")
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_new_process_finds_what_a_fork_finds(name: str, no_fork: None, tmp_path: Path) -> None:
    spawned = CALLBACKS[name]()
    assert train(Stack(), *spawned) == []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MEMFIT_CACHE", str(tmp_path / "other"))
        patched.setattr(process, "can_fork", lambda backward=True: True)
        forked = CALLBACKS[name]()
        train(Stack(), *forked)
    assert found_by(spawned[0]) == found_by(forked[0])


@pytest.mark.parametrize("name", CALLBACKS)
def test_what_can_not_be_sent_is_trained_without_traces(name: str, no_fork: None) -> None:
    callback, *others = CALLBACKS[name]()
    (warning,) = train(Unpicklable(), callback, *others)
    assert "can't be sent to a new one" in warning


@pytest.mark.nightly_cases("measure_step")
@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_a_profile_comes_from_a_new_process_or_is_refused(profile: Any, no_fork: None) -> None:
    batch = next(iter(samples()))
    settings = {"emulation": Emulation("cpu")} if profile is profile_module else {}
    spawned = profile(Stack(), batch, **settings)
    with pytest.raises(TraceError, match="can't be sent to a new one.* `memfit estimate`"):
        profile(Unpicklable(), batch, **settings)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process, "can_fork", lambda backward=True: True)
        forked = profile(Stack(), batch, **settings)
    assert (spawned.events.sizes == forked.events.sizes).all()
    assert spawned.flops == forked.flops


class OnDevice(Dataset):
    """Asks for a device, as data that lie there do."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> Any:
        if os.getpid() != HERE:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        return torch.full((16,), float(place))


HERE = os.getpid()


def test_data_on_a_device_are_not_read_before_the_run(no_fork: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer([], max_steps=1)
    run.fit(Stack(), samples())
    assert first_batch(run).shape == (64, 16)
    assert batches_per_epoch(run) == 2
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    run.fit_loop._data_source.instance = DataLoader(OnDevice(), batch_size=8)
    with pytest.raises(ValueError, match="a process without a device: Cannot re-initialize CUDA"):
        first_batch(run)


SCRIPT = """
import torch
import lightning.pytorch as pl
from lightning_memfit import MemFit, MemoryLimit
from lightning_memfit.profile import process

print("started", flush=True)

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

{guard}
    process.can_fork = lambda backward=True: not backward
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False,
                         callbacks=[MemFit(), MemoryLimit("64MiB")])
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.rand(8, 4), batch_size=4))
    print("trained", trainer.global_step, flush=True)
"""


@pytest.mark.nightly
@pytest.mark.nightly_cases("if __name__")
@pytest.mark.parametrize(("guard", "starts"), [("if True:", 1), ("if __name__ == '__main__':", 2)])
def test_a_script_runs_once(guard: str, starts: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEMFIT_CACHE": str(tmp_path / "cache"), "COLUMNS": "1000"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("started") == starts
    assert done.stdout.count("trained 2") == 1
    refused = "can't be planned" in done.stderr
    assert refused == (starts == 1), done.stderr
    assert ("if __name__ == '__main__':" in done.stderr) == refused
