"""The pages that commands and callbacks make, opened in headless Chromium where there is one."""

from pathlib import Path

import pytest

from lightning_memfit import MemoryLimit
from lightning_memfit.bench.report import write_report
from lightning_memfit.bench.run_timeline import RunTimeline
from tests.helpers.browser import CHROMIUM, Layout, lay_out
from tests.unit.bench.results import out_of_memory
from tests.unit.bench.test_run_timeline import train
from tests.unit.bench.test_scaling import at

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "scaling_cpu" / "report.html"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def check(layout: Layout, drawings: int) -> None:
    assert layout.errors == []
    assert layout.loaded == [], "a page must need nothing else"
    assert len(layout.svgs) == drawings
    assert sum(len(svg["texts"]) for svg in layout.svgs) > 5 * drawings
    assert layout.overlaps() == []
    assert layout.outside() == []
    assert layout.width <= layout.room, "the page is wider than its window"


@pytest.mark.parametrize("width", [1100, 480])
def test_the_committed_report_of_a_sweep(tmp_path: Path, width: int) -> None:
    check(lay_out(COMMITTED, tmp_path, width), drawings=4)


def test_a_report_of_many_curves_with_long_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [
        at(f"{name}{devices}", devices, f"{name} with checkpointing and 8-bit Adam", 1.0, 90.0 * devices, 400 * devices)
        for name in "abcdefghi"
        for devices in (1, 2, 4, 8)
    ]
    *_, page = write_report("Many", [*results, out_of_memory("z")], tmp_path, "memfit scale")
    check(lay_out(page, tmp_path), drawings=4)


@pytest.mark.parametrize("limited", [False, True])
def test_the_timeline_of_a_run(tmp_path: Path, limited: bool) -> None:
    page = tmp_path / "run.html"
    train(RunTimeline(page), *([MemoryLimit("512KiB")] if limited else []))
    check(lay_out(page, tmp_path), drawings=1)


def test_overlaps_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    texts = '<text x="10" y="20">first</text><text x="14" y="22">second</text><text x="90" y="90">third third</text>'
    page.write_text(
        "<!doctype html><html><title>t</title><body><img src='missing.png'>"
        f"<svg width='100' height='100' viewBox='0 0 100 100'>{texts}</svg><div style='width:3000px'>wide</div>"
    )
    layout = lay_out(page, tmp_path)
    assert layout.overlaps() == [("second", "first")]
    assert layout.outside() == ["third third"]
    assert [name.rpartition("/")[2] for name in layout.loaded] == ["missing.png"]
    assert layout.width > layout.room
