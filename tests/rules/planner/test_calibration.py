from dataclasses import replace
from pathlib import Path

import pytest

from lightning_memfit.planner.rates import (
    COMPONENTS,
    CalibrationFile,
    Observation,
    calibrated,
    fit_factors,
    uncorrected,
)

from .made import RATES


def seconds(**values: float) -> dict[str, float]:
    return {**dict.fromkeys(COMPONENTS, 0.0), **values}


def test_one_observation_scales_everything() -> None:
    factors = fit_factors([Observation(seconds(arithmetic=1.0, memory=1.0), 4.0)])
    assert factors["arithmetic"] == pytest.approx(2.0, rel=0.02)
    assert factors["memory"] == pytest.approx(2.0, rel=0.02)
    assert factors["link"] == pytest.approx(2.0, rel=0.02)


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
