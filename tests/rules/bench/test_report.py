"""Figures, pictures and page of a sweep: complete, and the same every time."""

import csv
import io
import re

import pytest

from lightning_memfit.bench.record import Speed
from lightning_memfit.bench.report import as_csv, curves_of, pareto_front, points_of, write_report

from .results import out_of_memory, result


def at(row: str, devices: int, technique: str, median: float, tokens: float, measured: int):
    speed = Speed(5, median, 0.8 * median, 2 * median, tokens / 10, tokens, 0.0)
    return result(row, measured, measured, speed=speed, point={"devices": devices, "technique": technique})


RESULTS = [
    at("a1", 1, "none", 1.0, 100.0, 400),
    at("a2", 2, "none", 1.1, 180.0, 500),
    at("a4", 4, "none", 1.2, 320.0, 500),
    at("b1", 1, "small", 2.0, 50.0, 200),
    at("b2", 2, "small", 2.0, 90.0, 450),
]


def test_speed_up_against_the_fewest_processes():
    curves = curves_of(points_of(RESULTS))
    assert [point.devices for point in curves["none"]] == [1, 2, 4]
    assert [point.per_second for point in curves["none"]] == pytest.approx([1.0, 1.8, 3.2])
    assert [point.per_second for point in curves["small"]] == pytest.approx([1.0, 1.8])


def test_curves_that_start_at_two_processes_start_at_two():
    [curve] = curves_of(points_of([RESULTS[1], RESULTS[2]])).values()
    assert [point.per_second for point in curve] == pytest.approx([2.0, 2 * 320 / 180])


def test_no_point_beats_one_on_the_front():
    points = points_of(RESULTS)
    front = pareto_front(points)
    assert [point.row for point in front] == ["b1", "a1", "a4"]
    for point in front:
        assert not any(
            other.measured_bytes <= point.measured_bytes and other.per_second > point.per_second for other in points
        )


def test_runs_without_figures_are_no_points_but_stand_in_the_csv():
    results = [*RESULTS, out_of_memory("c1")]
    assert len(points_of(results)) == len(RESULTS)
    rows = list(csv.DictReader(io.StringIO(as_csv(results))))
    assert [row["row"] for row in rows] == [result.row for result in results]
    assert rows[0]["tokens_per_second"] == "100.0"
    assert rows[0]["measured_bytes"] == "400"
    assert (rows[-1]["status"], rows[-1]["tokens_per_second"]) == ("out_of_memory", "")


def test_files_and_their_content(tmp_path):
    pytest.importorskip("matplotlib")
    results = [*RESULTS, out_of_memory("c1")]
    written = write_report("My sweep", results, tmp_path, "memfit scale")
    assert [path.name for path in written] == ["points.csv", "speedup.png", "memory.png", "pareto.png", "report.md"]
    for path in written[1:-1]:
        assert path.read_bytes().startswith(b"\x89PNG")
    page = written[-1].read_text()
    assert page.startswith("# My sweep\n6 runs. Made by `memfit scale`.")
    assert re.findall(r"\((\w+\.png)\)", page) == ["speedup.png", "memory.png", "pareto.png"]
    for row in results:
        assert row.title in page
    assert "out of memory" in page


def test_one_process_makes_no_curves(tmp_path):
    pytest.importorskip("matplotlib")
    written = write_report("T", [RESULTS[0]], tmp_path, "c")
    assert [path.name for path in written] == ["points.csv", "memory.png", "pareto.png", "report.md"]


def test_without_matplotlib_the_figures_remain(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"lightning-memfit\[plot\]\""):
        write_report("T", RESULTS, tmp_path, "c")
    assert (tmp_path / "points.csv").exists()
