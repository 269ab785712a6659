"""The page of a real run's first steps."""

import re

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memfit import MemoryMonitor
from lightning_memfit.bench.run_timeline import RunTimeline
from lightning_memfit.memory import format_bytes
from tests.helpers.modules import Layers
from tests.helpers.trainers import fit


def train(*callbacks: pl.Callback, max_steps: int = 4) -> pl.Trainer:
    return fit(Layers(64, 256, 1), *callbacks, loader=DataLoader(torch.randn(64, 64), 8), max_steps=max_steps)


def test_the_peak_is_that_of_the_monitor(tmp_path):
    path, monitor = tmp_path / "pages" / "run.html", MemoryMonitor(tracked_steps=2)
    trainer = train(RunTimeline(path))
    train(monitor)  # on its own: on the CPU each of two that follow tensors makes a copy of the batch
    page = path.read_text()
    assert monitor.report is not None
    assert f"Peak of live tensors {format_bytes(monitor.report.measured_peak_bytes)} in" in page
    for text in ("parameters", "gradients", "optimizer states", "activations", "forward", "backward", "second"):
        assert text in page
    assert not re.search(r"<script|<link|@import|url\(", page)
    assert "training_step" not in vars(trainer.strategy)


def test_recording_changes_nothing(tmp_path):
    weights = []
    for callbacks in ([], [RunTimeline(tmp_path / "run.html")]):
        torch.manual_seed(0)
        weights.append(train(*callbacks).lightning_module.net[0].weight.detach())
    assert torch.equal(*weights)


def test_a_page_is_not_overwritten(tmp_path):
    path = tmp_path / "run.html"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"`path=.*run.html` exists already"):
        train(RunTimeline(path))
    assert path.read_text() == "mine"


def test_a_run_that_is_too_short_says_so(tmp_path):
    with pytest.warns(UserWarning, match="fewer than 2 optimizer steps"):
        trainer = train(RunTimeline(tmp_path / "run.html"), max_steps=1)
    assert not (tmp_path / "run.html").exists()
    assert "training_step" not in vars(trainer.strategy)
