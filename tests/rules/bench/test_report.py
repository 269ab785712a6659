"""Pictures and page of a sweep: complete, and the same every time."""

import re

import pytest

from lightning_memfit.bench.report import write_report

from .results import out_of_memory
from .test_scaling import RESULTS

pytest.importorskip("matplotlib")


def test_files_and_their_content(tmp_path):
    results = [*RESULTS, out_of_memory("c1")]
    written = write_report("My sweep", results, tmp_path, "memfit scale")
    assert [path.name for path in written] == ["points.csv", "speedup.png", "memory.png", "pareto.png", "report.md"]
    for path in written[1:-1]:
        assert path.read_bytes().startswith(b"\x89PNG")
    page = written[-1].read_text()
    assert page.startswith("# My sweep\n6 runs. Made by `memfit scale`.")
    assert re.findall(r"\((\w+\.png)\)", page) == ["speedup.png", "memory.png", "pareto.png"]
    for result in results:
        assert result.title in page
    assert "out of memory" in page


def test_one_process_makes_no_curves(tmp_path):
    written = write_report("T", [RESULTS[0]], tmp_path, "c")
    assert [path.name for path in written] == ["points.csv", "memory.png", "pareto.png", "report.md"]


def test_without_matplotlib_the_figures_remain(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"lightning-memfit\[plot\]\""):
        write_report("T", RESULTS, tmp_path, "c")
    assert (tmp_path / "points.csv").exists()
