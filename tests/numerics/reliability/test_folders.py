"""Folders of checkpoints that a run needs late are tried before it trains."""

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memfit import NonFiniteGuard, OutOfMemoryReport, Preemption
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer


class Leaves(Callback):
    """Changes the working folder in the first step, and gets a signal in the second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            os.chdir(self.folder)
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _wrong(kind: str, folder: Path) -> Path:
    (folder / "file").write_text("")
    return {"a file": folder / "file", "a folder of the system": Path("/proc/nope/checkpoints")}[kind]


def _callbacks(owner: str, folder: Path) -> tuple[str, list[Callback]]:
    if owner == "OutOfMemoryReport":
        return "folder", [OutOfMemoryReport(folder)]
    return "dirpath", [{"Preemption": Preemption, "NonFiniteGuard": NonFiniteGuard}[owner](dirpath=str(folder))]


CASES = [
    ("Preemption", "a file"),
    ("Preemption", "a folder of the system"),
    ("NonFiniteGuard", "a file"),
    ("OutOfMemoryReport", "a file"),
]


@pytest.mark.parametrize(("owner", "kind"), CASES)
def test_a_folder_that_cant_be_written_is_refused_before_training(
    owner: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "a folder of the system" and not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    kinds = SimpleNamespace(of=lambda _: SimpleNamespace(has_caching_allocator=True))  # others have no snapshots
    monkeypatch.setattr("lightning_memfit.fitting.recovery.oom_report.DeviceKind", kinds)
    folder, module = _wrong(kind, tmp_path), BoringModel()
    argument, callbacks = _callbacks(owner, folder)
    before = sorted(tmp_path.iterdir())
    trainer = quiet_trainer(*callbacks, max_steps=2, limit_val_batches=0)
    message = rf"`{owner}\({argument}='[^']*{re.escape(folder.name)}'\)` can't be written: .+ Name a folder"
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(module)
    assert trainer.global_step == 0
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("owner", ["Preemption", "ModelCheckpoint", "default_root_dir"])
def test_a_url_stays_one(owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url, files = f"memory://{tmp_path.name}/{owner}", fsspec.filesystem("memory")
    for number in ("", "-v1"):  # a second one replaces none
        preemption = Preemption(dirpath=url if owner == "Preemption" else None)
        callbacks = [ModelCheckpoint(url, monitor="never")] if owner == "ModelCheckpoint" else []
        options: dict[str, Any] = {"default_root_dir": url} if owner == "default_root_dir" else {}
        trainer = quiet_trainer(
            Leaves(tmp_path),
            *callbacks,
            preemption,
            limit_val_batches=0,
            enable_checkpointing=bool(callbacks),
            **options,
        )
        with pytest.raises(SystemExit):
            trainer.fit(BoringModel())
        folder = f"{url}/checkpoints" if owner == "default_root_dir" else url
        assert f"--ckpt_path {folder}/preempted-step=2{number}.ckpt`" in str(preemption.error)
        assert files.exists(f"{folder}/preempted-step=2{number}.ckpt")
    assert not list(tmp_path.iterdir())


def test_snapshots_are_written_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"`folder=s3://bucket`: .* Name a folder here"):
        OutOfMemoryReport("s3://bucket")
    monkeypatch.chdir(tmp_path)
    kinds = SimpleNamespace(of=lambda _: SimpleNamespace(has_caching_allocator=True))
    monkeypatch.setattr("lightning_memfit.fitting.recovery.oom_report.DeviceKind", kinds)
    monkeypatch.setattr("lightning_memfit.fitting.recovery.oom_report.dump_snapshot", lambda path: path.write_text(""))
    report = OutOfMemoryReport()
    report._take_snapshot(quiet_trainer(default_root_dir="memory://bucket"))
    assert report.snapshot_path == tmp_path / "out_of_memory_rank0.pickle"
    assert report.snapshot_path.exists()


def on_two_ranks(folder: Path) -> int:
    """Steps that a rank takes with a folder that only the first one looks at."""
    strategy = DDPStrategy(process_group_backend="gloo")
    guard = NonFiniteGuard(dirpath=str(folder))
    trainer = quiet_trainer(guard, max_steps=2, limit_val_batches=0, devices=2, strategy=strategy)
    with pytest.raises(MisconfigurationException, match="can't be written"):
        trainer.fit(BoringModel())
    return trainer.global_step


def test_all_ranks_refuse_together(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run_ranks(on_two_ranks, 2, tmp_path / "ranks", tmp_path / "file", seconds=60)
    assert [one.result for one in ended] == [0, 0], [one.output[-2000:] for one in ended]
