"""Predicted against measured reaches the logger, of one process and of two."""

import csv
import subprocess
import sys
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_memfit import MemoryMonitor, MemoryPrediction
from lightning_memfit.measure.data_wait import DataWaitMonitor
from lightning_memfit.measure.summary import RunSummary
from lightning_memfit.measure.utilization import FlopsMonitor
from tests.helpers.wandb_files import read_run

from .test_utilization import fit


def test_every_logger_gets_predicted_and_measured(tmp_path):
    monitor = MemoryMonitor(tracked_steps=2)
    watching = [MemoryPrediction(), monitor, DataWaitMonitor(), FlopsMonitor(peak_flops=1e12), RunSummary()]
    logger, _ = fit(tmp_path, *watching)
    assert monitor.report is not None
    assert logger.seen["summary/prediction_error"] == pytest.approx(monitor.report.prediction_error)
    assert logger.seen["summary/measured_peak_gib"] * 2**30 == pytest.approx(monitor.report.measured_peak_bytes)
    assert logger.seen["summary/mfu"] > 0
    assert logger.seen["summary/data_wait_fraction"] > 0
    assert "summary/measured_peak_max_rank_gib" not in logger.seen
    [file] = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        assert float(list(csv.DictReader(lines))[-1]["summary/predicted_peak_gib"]) > 0


FIGURES = ("memory/parameter_gib", "memory/rss_gib", "throughput/seconds_per_step", "summary/prediction_error")


A_LOGGED_RUN = """
import sys
import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning_memfit import MemoryMonitor, MemoryPrediction
from lightning_memfit.measure.summary import RunSummary
from tests.rules.measure.test_utilization import fit

logger = WandbLogger(project="p", save_dir=sys.argv[1], offline=True)
fit(sys.argv[1], MemoryPrediction(), MemoryMonitor(tracked_steps=2), RunSummary(), extra_logger=logger)
wandb.finish()
"""


@pytest.mark.nightly
def test_weights_and_biases_gets_the_same(tmp_path, pytestconfig):
    pytest.importorskip("wandb")
    # W&B keeps threads and a current run for a whole process; at the end of this one everything is on disk.
    command = [sys.executable, "-c", A_LOGGED_RUN, tmp_path]
    subprocess.run(command, check=True, timeout=300, cwd=pytestconfig.rootpath)
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    run = read_run(folder)
    logged = {name for row in run["history"] for name in row}
    assert set(FIGURES) <= logged
    assert sum("memory/parameter_gib" in row for row in run["history"]) > 1


class Ranks:
    """A trainer of two processes, the other of which used more."""

    world_size = 2
    is_global_zero = True
    global_step = 3

    def __init__(self, *callbacks: pl.Callback) -> None:
        import torch

        self.callbacks = list(callbacks)
        self.logged: dict[str, float] = {}
        self.loggers = [self]
        self.strategy = self
        self.root_device = torch.device("cpu")

    def all_gather(self, tensor: Any) -> Any:
        import torch

        return torch.stack([tensor, 2 * tensor])

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged = metrics

    def save(self) -> None:
        pass


def test_the_largest_of_all_processes(tmp_path):
    monitor = MemoryMonitor(tracked_steps=2)
    fit(tmp_path, monitor)
    trainer = Ranks(monitor)
    RunSummary().on_fit_end(trainer, None)
    assert trainer.logged["summary/measured_peak_max_rank_gib"] == 2 * trainer.logged["summary/measured_peak_gib"]
    assert trainer.logged["summary/samples_per_second"] == pytest.approx(2 * monitor.report.samples_per_second)
