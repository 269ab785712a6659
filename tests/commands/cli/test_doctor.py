import json
from pathlib import Path

import pytest

from cli import doctor
from lightning_memfit.device.health import Finding
from lightning_memfit.planner.rates import Measured, calibrated, cpu_rates

FINE = {"GPU": [Finding("driver", "ok", "NVIDIA 570.1")], "disk": [Finding("O_DIRECT", "note", "no", "another folder")]}
BAD = {"GPU": [Finding("driver", "problem", "1 NVIDIA card(s), no driver", "install the driver")]}


@pytest.mark.parametrize(("findings", "code"), [(FINE, 0), (BAD, 1)])
def test_exit_code_and_json(
    findings: dict[str, list[Finding]], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_memfit.device.health.examine", lambda folder: findings)
    assert doctor.main(["--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["hinders"] == bool(code)
    assert document["findings"]["GPU"][0]["name"] == "driver"


def test_table_shows_the_fix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lightning_memfit.device.health.examine", lambda folder: BAD)
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "install the driver" in output
    assert "hinder" in output


def test_what_was_measured_is_shown_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Measured({"elementwise": 2.0**30, "product float32": 2e12}, 5e-6, 1.0)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    monkeypatch.setattr("lightning_memfit.planner.measured.measure", lambda device: found)
    doctor.main(["--measure", "--json", "--folder", str(tmp_path)])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["findings"]
    assert "elementwise: 1.00 GiB/s" in printed.err
    assert "product float32: 2 TFLOP/s" in printed.err
    assert calibrated(cpu_rates()).operators == found.operators
