import re

import pytest

from lightning_memfit.estimate.report import build_report
from lightning_memfit.estimate.target import Target, named_target, unnamed_target
from lightning_memfit.estimate.timeline import render, write_timeline
from lightning_memfit.memory import MIB, format_bytes
from tests.rules.estimate.steps import STATE, step_profile


@pytest.fixture(scope="module")
def page():
    return render(build_report(step_profile(), named_target("1GiB")))


def test_page_needs_nothing_else(page):
    assert "<svg" in page
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)


def test_page_names_categories_phases_and_figures(page):
    for text in ("parameters", "optimizer states", "gradients", "activations", "temporary", "forward", "backward"):
        assert text in page
    assert format_bytes(STATE) in page
    assert "room for tensors on" in page


def test_areas_are_stacked(page):
    heights = [
        min(float(y) for _, y in re.findall(r"([\d.]+),([\d.]+)", shape))
        for shape in re.findall(r'points="([^"]+)"', page)
    ]
    assert len(heights) > 3
    assert heights == sorted(heights, reverse=True)


def test_coordinates_stay_inside(page):
    for x, y in re.findall(r"([\d.]+),([\d.]+)", " ".join(re.findall(r'points="([^"]+)"', page))):
        assert 90 <= float(x) <= 1120 - 16
        assert 34 <= float(y) <= 440 - 30


def test_a_limit_is_drawn_where_it_is_near():
    assert "room for tensors" not in render(build_report(step_profile(), named_target("A100 80GB")))
    assert "room for tensors" not in render(build_report(step_profile(), unnamed_target()))


def test_names_are_escaped():
    target = Target("<script>alert(1)</script>", "cuda", 300 * MIB)
    assert "<script>" not in render(build_report(step_profile(), target))


def test_nothing_is_overwritten(tmp_path):
    report = build_report(step_profile(), unnamed_target())
    path = write_timeline(report, tmp_path / "a.html")
    before = path.read_text()
    with pytest.raises(ValueError, match="exists already"):
        write_timeline(report, path)
    assert path.read_text() == before
    with pytest.raises(ValueError, match="No such file"):
        write_timeline(report, tmp_path / "none" / "a.html")
