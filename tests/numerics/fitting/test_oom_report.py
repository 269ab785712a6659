"""What is said of a run that ends because memory ran out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memfit import MemoryLimit, MicroBatching, OutOfMemoryReport
from lightning_memfit.fitting.recovery import oom_report
from lightning_memfit.memory.kind import DeviceKind

WIDTH, SAMPLES = 64, 32


class Wide(pl.LightningModule):
    """One layer whose output is far larger than everything else."""

    def __init__(self, fail_in: str = "") -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 16 * WIDTH, bias=False)
        self.fail_in = fail_in
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        loss = self.head(batch).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.fail_in == "epoch":
            raise MemoryError("no more")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise torch.OutOfMemoryError("in validation")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(tmp_path: Path, *callbacks: pl.Callback, module: Wide | None = None, **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=tmp_path,
        callbacks=list(callbacks),
        **quiet,
        **options,
    )
    data = torch.randn(SAMPLES, 256, WIDTH)
    loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES)
    trainer.fit(module or Wide(), loader, loader if options.get("limit_val_batches") else None)
    return trainer


@pytest.mark.parametrize("limit_first", [True, False])
def test_the_largest_tensors_and_their_modules(tmp_path, capsys, limit_first):
    report, limit = OutOfMemoryReport(), MemoryLimit("40MiB")
    module = Wide()
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, *((limit, report) if limit_first else (report, limit)), module=module)
    text = report.text
    assert text is not None
    assert text in capsys.readouterr().err
    assert "parameter 256.00 KiB" in text
    assert "32.00 MiB  (32, 256, 1024) float32 kept for backward by `" in text
    assert "`memfit plan`" in text
    assert report.snapshot_path is None
    assert module.calls == 2, "the failing step and one more"
    assert "log" not in vars(module)


def test_the_runs_numbers_are_left_alone(tmp_path):
    """The step that is run again draws no random numbers of the run and logs nothing."""
    report = OutOfMemoryReport()
    torch.manual_seed(3)
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, report, MemoryLimit("40MiB"))
    after = torch.rand(1)
    torch.manual_seed(3)
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemoryLimit("40MiB"))
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("where", ["epoch", "validation"])
def test_errors_outside_of_a_step_are_told_without_one(tmp_path, where):
    report, module = OutOfMemoryReport(), Wide(fail_in=where)
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 0} if where == "validation" else {}
    with pytest.raises((MemoryError, torch.OutOfMemoryError)):
        fit(tmp_path, report, module=module, **options)
    assert "optimizer state" in report.text
    assert module.calls == 1


def test_beside_micro_batching_one_sample_is_run(tmp_path):
    report = OutOfMemoryReport()
    with pytest.raises(torch.OutOfMemoryError, match="one sample"):
        fit(tmp_path, MicroBatching(), MemoryLimit("3MiB"), report)
    assert "1.00 MiB  (1, 256, 1024) float32 kept for backward by `" in report.text


def test_on_cuda_a_snapshot_is_written_before_anything_is_let_go(tmp_path, monkeypatch):
    """Without CUDA the calls are watched; on CUDA see the test below."""
    calls: list[Any] = []
    for name in ("start_history", "stop_history", "dump_snapshot"):
        monkeypatch.setattr(oom_report, name, lambda *a, name=name: calls.append((name, *a)) or True)
    monkeypatch.setattr(oom_report, "explain", lambda *a: calls.append(("explain",)) or "explained")
    monkeypatch.setattr(pl.strategies.SingleDeviceStrategy, "root_device", torch.device("cuda", 0))
    report = OutOfMemoryReport(folder=tmp_path / "snapshots")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    for number in ("", "-2"):
        report.on_fit_start(trainer, Wide())
        report.on_exception(trainer, Wide(), torch.OutOfMemoryError("CUDA out of memory."))
        path = tmp_path / "snapshots" / f"out_of_memory_rank0{number}.pickle"
        assert calls == [("start_history",), ("dump_snapshot", path), ("explain",), ("stop_history",)]
        assert f"Memory snapshot: {path}" in report.text
        path.parent.mkdir(exist_ok=True)
        path.touch()
        calls.clear()


@pytest.fixture
def cpu_as_cuda(monkeypatch):
    """The CPU in the role of a CUDA device without a history; returns the calls that were made."""
    calls: list[Any] = []
    record = lambda enabled="all", **options: calls.append(enabled)  # noqa: E731
    monkeypatch.setattr(oom_report, "DeviceKind", SimpleNamespace(of=lambda device: DeviceKind.of("cuda")))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    is_on = lambda: bool(calls) and calls[-1] is not None  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", is_on, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    return calls


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("is_users", [True, False])
def test_on_cuda_only_its_own_history_is_ended(tmp_path, cpu_as_cuda, is_users, fails):
    if is_users:
        torch.cuda.memory._record_memory_history("all")
    if fails:
        with pytest.raises(MemoryError, match="no more"):
            fit(tmp_path, OutOfMemoryReport(), module=Wide(fail_in="epoch"))
    else:
        fit(tmp_path, OutOfMemoryReport())
    assert cpu_as_cuda == (["all"] if is_users else ["all", None])


def test_on_cuda_a_full_disk_does_not_hide_the_error(tmp_path, cpu_as_cuda, monkeypatch):
    def dump(path):
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    report = OutOfMemoryReport(folder=tmp_path / "snapshots")
    with pytest.raises(MemoryError, match="no more"):
        fit(tmp_path, report, module=Wide(fail_in="epoch"))
    assert "No memory snapshot could be written: OSError: [Errno 28] No space left on device." in report.text
    assert "optimizer state" in report.text
    assert report.snapshot_path is None
    assert list((tmp_path / "snapshots").iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_snapshot_names_lines_of_code(tmp_path):
    import pickle

    report = OutOfMemoryReport(folder=tmp_path)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        callbacks=[report, MemoryLimit("160MiB")],  # 64 MiB of it for workspaces
    )  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Wide(), torch.utils.data.DataLoader(torch.randn(SAMPLES, 256, WIDTH), batch_size=SAMPLES))
    snapshot = pickle.loads(report.snapshot_path.read_bytes())
    assert snapshot["segments"]
    frames = {frame["filename"] for trace in snapshot["device_traces"] for entry in trace for frame in entry["frames"]}
    assert any(name.endswith("test_oom_report.py") for name in frames)
