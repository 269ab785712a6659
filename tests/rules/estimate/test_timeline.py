import re

import pytest

from lightning_memfit.estimate.report import build_report
from lightning_memfit.estimate.target import Target, named_target, unnamed_target
from lightning_memfit.estimate.timeline import COLOURS, render, write_timeline
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


def test_areas_are_stacked_to_the_peak(page):
    bottom = 470 - 62
    heights = [
        min(float(y) for _, y in re.findall(r"([\d.]+),([\d.]+)", shape))
        for shape in re.findall(r'points="([^"]+)"', page)
    ]
    circle = float(re.search(r'cy="([\d.]+)"', page)[1])
    assert min(heights) == circle < bottom
    assert heights == sorted(heights, reverse=True)


def test_coordinates_stay_inside(page):
    for x, y in re.findall(r"([\d.]+),([\d.]+)", " ".join(re.findall(r'points="([^"]+)"', page))):
        assert 70 <= float(x) <= 1120 - 16
        assert 34 <= float(y) <= 470 - 62


def test_limit_far_above_is_said_in_words():
    assert "above this chart" in render(build_report(step_profile(), named_target("A100 80GB")))
    assert "room for tensors" not in render(build_report(step_profile(), unnamed_target()))


def test_what_the_table_has_beside_the_tensors_is_said(page):
    report = build_report(step_profile(), named_target("1GiB"))
    estimate = report.estimate
    assert estimate.workspace_bytes
    assert f"The {format_bytes(estimate.allocated_bytes)} that the table has as allocated are tensors" in page
    assert f"{format_bytes(estimate.workspace_bytes)} of workspaces" in page
    assert f"{format_bytes(estimate.spare_bytes)} to spare in blocks of the allocator" in page
    assert f"Peak of live tensors {format_bytes(estimate.tensor_bytes)} in" in page
    assert "the table" not in render(build_report(step_profile(), Target("a card", "cuda", 300 * MIB)))


def test_names_are_escaped():
    target = Target("<script>alert(1)</script>", "cuda", 300 * MIB)
    assert "<script>" not in render(build_report(step_profile(), target))


def test_colours_differ():
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_nothing_is_overwritten(tmp_path):
    report = build_report(step_profile(), unnamed_target())
    path = write_timeline(report, tmp_path / "a.html")
    before = path.read_text()
    with pytest.raises(ValueError, match="exists already"):
        write_timeline(report, path)
    assert path.read_text() == before
    with pytest.raises(ValueError, match="no folder"):
        write_timeline(report, tmp_path / "none" / "a.html")
