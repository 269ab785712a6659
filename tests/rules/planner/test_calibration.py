"""What runs teach the rates of a device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memfit.estimate.target import named_target
from lightning_memfit.planner.feedback import PlanFeedback
from lightning_memfit.planner.measured import measure
from lightning_memfit.planner.rates import (
    COMPONENTS,
    CalibrationFile,
    Measured,
    Observation,
    calibrated,
    cpu_name,
    cpu_rates,
    fit_factors,
    rates_of,
    uncorrected,
)
from tests.helpers.modules import Layers
from tests.helpers.trainers import fit

from .made import RATES


def seconds(**values: float) -> dict[str, float]:
    return {**dict.fromkeys(COMPONENTS, 0.0), **values}


def test_many_observations_tell_components_apart() -> None:
    rows = [
        Observation(seconds(arithmetic=a, memory=m, optimizer=o), 1.5 * a + 3.0 * m + 0.5 * o)
        for a, m, o in [(1, 0.1, 0.2), (0.1, 1, 0.2), (0.2, 0.1, 1), (1, 1, 1), (3, 1, 0.5)] * 4
    ]
    factors = fit_factors(rows)
    assert factors["arithmetic"] == pytest.approx(1.5, rel=0.1)
    assert factors["memory"] == pytest.approx(3.0, rel=0.1)
    assert factors["optimizer"] == pytest.approx(0.5, rel=0.15)


def test_factors_stay_within_reason() -> None:
    assert max(fit_factors([Observation(seconds(arithmetic=1e-6), 100.0)]).values()) <= 10.0


def test_observations_are_kept_per_device(tmp_path: Path) -> None:
    file = CalibrationFile(RATES.name, tmp_path)
    file.add(seconds(arithmetic=1.0), 2.0)
    assert calibrated(RATES, tmp_path).factor("arithmetic") == pytest.approx(2.0, rel=0.05)
    assert calibrated(replace(RATES, name="another"), tmp_path).factors == {}


def test_corrections_are_taken_out_of_a_prediction() -> None:
    corrected = replace(RATES, factors={"arithmetic": 2.0})
    assert uncorrected(seconds(arithmetic=2.0), corrected)["arithmetic"] == 1.0


def test_a_broken_file_counts_as_none(tmp_path: Path) -> None:
    file = CalibrationFile(RATES.name, tmp_path)
    file.path.parent.mkdir()
    file.path.write_text("{")
    assert file.load() == []


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


@pytest.mark.parametrize(("device", "num_steps"), [("RTX 3060 12GB", 3), (cpu_name(), 50)])
def test_another_device_and_too_short_a_run_teach_nothing(device: str, num_steps: int) -> None:
    callback = PlanFeedback({"arithmetic": 0.001}, device, num_steps=num_steps)
    train(callback, max_steps=8)
    assert (callback.measured_seconds is None) == (num_steps == 50)
    assert CalibrationFile(device).load() == []


def test_number_of_steps() -> None:
    with pytest.raises(ValueError, match="num_steps=0"):
        PlanFeedback({}, "x", num_steps=0)


def test_rates_of_a_card_are_below_its_data_sheet() -> None:
    rates = rates_of(named_target("RTX 3060"))
    assert rates.name == "RTX 3060 12GB"
    assert 0 < rates.flops_per_s["bfloat16"] < 25.4e12
    assert rates.bytes_per_s < 360e9
    assert rates.asynchronous


def test_a_bare_size_takes_a_common_card_of_that_size() -> None:
    rates = rates_of(named_target("24GiB"))
    assert rates.flops_per_s == rates_of(named_target("RTX 3090")).flops_per_s
    assert rates.name == "device of 24.00 GiB"


def test_what_doctor_measured_is_what_plans_take(tmp_path) -> None:
    found = measure(torch.device("cpu"))
    assert {"product float32", "attention float32", "elementwise", "function", "indexing"} <= set(found.operators)
    assert 1e-7 < found.launch_seconds < 1e-3
    rates = cpu_rates()
    CalibrationFile(rates.name, tmp_path).keep(found)
    assert calibrated(rates, tmp_path).operators == found.operators
    assert calibrated(rates, tmp_path).launch_seconds == found.launch_seconds


def test_a_measurement_keeps_later_steps_and_lets_earlier_ones_go(tmp_path) -> None:
    file, found = CalibrationFile("a card", tmp_path), Measured({"elementwise": 1e9}, 1e-6, 1.0)
    file.add({"memory": 1.0}, 2.0)
    file.keep(found)
    assert (file.measured(), file.load()) == (found, [])
    file.add({"memory": 1.0}, 3.0)
    assert (file.measured(), len(file.load())) == (found, 1)
