from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memfit.planner.feedback import PlanFeedback
from lightning_memfit.planner.rates import CalibrationFile, cpu_name
from tests.helpers.modules import Layers
from tests.helpers.trainers import fit


def train(callback: PlanFeedback, max_steps: int) -> None:
    loader = DataLoader(torch.ones(64, 4), batch_size=2)
    fit(Layers(4, 1), callback, loader=loader, max_steps=max_steps, accumulate_grad_batches=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))


def test_steps_are_measured_and_kept() -> None:
    callback = PlanFeedback({"arithmetic": 0.001}, cpu_name(), num_steps=3)
    train(callback, max_steps=8)
    assert callback.measured_seconds is not None
    [observation] = CalibrationFile(cpu_name()).load()
    assert observation.measured == callback.measured_seconds
    assert observation.seconds == {"arithmetic": 0.001}


def test_another_device_teaches_nothing() -> None:
    callback = PlanFeedback({"arithmetic": 0.001}, "RTX 3060 12GB", num_steps=3)
    train(callback, max_steps=8)
    assert callback.measured_seconds is not None
    assert CalibrationFile("RTX 3060 12GB").load() == []


def test_a_run_that_is_too_short_teaches_nothing() -> None:
    callback = PlanFeedback({"arithmetic": 0.001}, cpu_name(), num_steps=50)
    train(callback, max_steps=4)
    assert callback.measured_seconds is None
    assert CalibrationFile(cpu_name()).load() == []


def test_number_of_steps() -> None:
    with pytest.raises(ValueError, match="num_steps=0"):
        PlanFeedback({}, "x", num_steps=0)
