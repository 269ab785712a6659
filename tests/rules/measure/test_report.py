import io
import json
import math

import pytest
from rich.console import Console

from lightning_memfit.measure.report import RunReport
from lightning_memfit.memory import GIB, Category, MemoryBreakdown


def printed(report, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(report.table())
    return console.file.getvalue()


def breakdown(gradient=GIB, **others):
    return MemoryBreakdown.device({Category.GRADIENT: gradient, **{Category(k): v for k, v in others.items()}})


def test_what_was_not_measured_is_said():
    text = printed(RunReport(device="cpu", num_steps=1))
    for words in ("not predicted", "not tracked", "run too short"):
        assert words in text
    assert "CUDA" not in text


def test_prediction_and_measurement_stand_side_by_side():
    report = RunReport(
        device="cpu",
        num_steps=10,
        predicted=breakdown(runtime_context=GIB // 2),
        measured=breakdown(),
        measured_over="the first 3 optimizer steps",
        tokens_per_second=12345.6,
        loss_name="val_loss",
        first_loss=5.5,
        last_loss=2.25,
    )
    text = printed(report)
    assert "gradient" in text
    assert "12,346" in text
    assert "5.5000 -> 2.2500" in text
    assert "first 3 optimizer steps" in text
    assert report.prediction_error == 0
    assert "off by +0.00 %" in text
    assert "more than" not in text


def test_json_holds_integers_and_overwrites_nothing(tmp_path):
    report = RunReport(device="cpu", num_steps=3, measured=breakdown(), rss_bytes=5)
    first = report.write(tmp_path / "runs" / "report.json")
    second = report.write(tmp_path / "runs" / "report.json")
    assert (first.name, second.name) == ("report.json", "report-2.json")
    data = json.loads(first.read_text())
    assert data["measured"] == {"device": {"gradient": GIB}}
    assert (data["predicted"], data["rss_bytes"], data["prediction_error"]) == (None, 5, None)


def test_a_report_of_a_loss_that_diverged_is_json_for_every_reader(tmp_path):
    file = RunReport("cpu", 1, loss_name="val_loss", first_loss=2.5, last_loss=math.nan).write(tmp_path / "report.json")
    data = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (data["first_loss"], data["last_loss"]) == (2.5, "NaN")
