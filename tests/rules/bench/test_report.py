"""Pictures and page of a sweep: complete, without a network, the same every time."""

import re
from html.parser import HTMLParser

import pytest

from lightning_memfit.bench.report import write_report

from .results import out_of_memory
from .test_scaling import RESULTS

pytest.importorskip("matplotlib")

_EMPTY = {"meta", "path", "use", "br", "rect", "link"}


class Tags(HTMLParser):
    """Checks that tags close, and collects what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        for name in ("src", "href", "xlink:href"):
            if name in values and not values[name].startswith("#"):
                self.loads.append(values[name])
        if tag in ("script", "link", "iframe"):
            self.loads.append(tag)
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in _EMPTY:
            assert self.open.pop() == tag


def test_files_and_their_content(tmp_path):
    results = [*RESULTS, out_of_memory("c1")]
    written = write_report("My <sweep>", results, tmp_path, "memfit scale")
    assert [path.name for path in written] == [
        "points.csv",
        "speedup.png",
        "memory.png",
        "pareto.png",
        "report.html",
    ]
    for path in written[1:-1]:
        assert path.read_bytes().startswith(b"\x89PNG")
    page = written[-1].read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.loads == []
    assert not re.search(r"url\((?!#)|@import", page)
    assert "My &lt;sweep&gt;" in page
    assert page.count("<svg") == 3
    for result in results:
        assert result.title in page
    assert "out of memory" in page


def test_the_same_results_make_the_same_files(tmp_path):
    pages = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_report("T", RESULTS, tmp_path / name, "c")
        pages.append((tmp_path / name / "report.html").read_text())
    assert pages[0] == pages[1]


def test_one_process_makes_no_curves(tmp_path):
    written = write_report("T", [RESULTS[0]], tmp_path, "c")
    assert [path.name for path in written] == ["points.csv", "memory.png", "pareto.png", "report.html"]


def test_without_matplotlib_the_figures_remain(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"lightning-memfit\[plot\]\""):
        write_report("T", RESULTS, tmp_path, "c")
    assert (tmp_path / "points.csv").exists()
