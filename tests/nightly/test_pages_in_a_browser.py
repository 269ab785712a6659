"""The pages that commands and callbacks make, opened in headless Chromium where there is one."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_memfit import MemoryLimit
from lightning_memfit.bench.run_timeline import RunTimeline
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.units import format_seconds
from tests.helpers.browser import CHROMIUM, Layout, browser, lay_out
from tests.rules.bench.test_run_timeline import train
from tests.rules.planner.test_plan_page import PAYLOAD, explored, page_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def check(layout: Layout, drawings: int) -> None:
    assert layout.errors == []
    assert layout.loaded == [], "a page must need nothing else"
    assert len(layout.svgs) == drawings
    assert sum(len(svg["texts"]) for svg in layout.svgs) > 5 * drawings
    assert layout.overlaps() == []
    assert layout.outside() == []
    assert layout.width <= layout.room, "the page is wider than its window"


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


def test_the_settings_of_a_plan(tmp_path: Path) -> None:
    plan, found, _ = explored(1200)
    page = tmp_path / "plan.html"
    page.write_text(page_of(replace(plan, model=PAYLOAD, device=PAYLOAD), found), encoding="utf-8")
    with browser(tmp_path) as tab:

        def text(name: str) -> str:
            return str(tab.value(f"document.getElementById('{name}').innerText"))

        for width, dark in ((480, True), (1100, False)):
            tab.open(page, width, dark)
            assert tab.value("errors") == []
            assert tab.value("document.documentElement.scrollWidth <= innerWidth")
            assert tab.value("getComputedStyle(document.body).backgroundColor") == (
                "rgb(23, 24, 26)" if dark else "rgb(255, 255, 255)"
            )
        assert tab.value("[...document.images].length") == 0  # the payload is text
        assert f"{format_bytes(plan.needed_bytes)} of {format_bytes(plan.usable_bytes)} usable" in text("best")
        assert f"{format_seconds(plan.seconds_per_step)} per step" in text("facts")
        assert "proved" in text("best")
        assert tab.value("document.getElementById('yaml').value") == PAYLOAD

        # Another size, by a click: the best there is what Python finds among the settings.
        other = len(found.limits) - 1
        tab.click(f"#sizes [data-limit='{other}']")
        assert tab.value("limit") == other
        best = found.tried[tab.value("best()")]
        fitting = [one for one in found.tried if one.plan.needed_bytes <= found.limits[other].usable_bytes]
        cost = min(one.plan.seconds_per_step * one.weight for one in fitting)
        assert best.plan.seconds_per_step * best.weight <= cost * (1 + found.tie)
        assert format_bytes(best.plan.needed_bytes) in text("best")
        assert "proved" not in text("best")

        # Filters leave what keeps the numbers; the arrow keys move the limit and the chosen dot.
        for name in tab.value("[...document.querySelectorAll('#changes input')].map(e => e.dataset.name)"):
            tab.click(f"#changes [data-name='{name}']")
        assert tab.value("tried.filter(shown).length") == sum(not one.plan.changes for one in found.tried)
        tab.press("Home", "#limit")
        assert tab.value("limit") == 0
        tab.press("ArrowRight", "#limit")
        assert tab.value("limit") == 1
        tab.open(page)
        tab.value("chosen = 0, update()")
        tab.press("ArrowRight", "#chart")
        chosen = found.tried[tab.value("chosen")].plan
        assert tab.value("chosen") > 0
        assert format_bytes(chosen.needed_bytes) in text("facts")

        # The line is dragged to the right end.
        tab.value("document.querySelector('#limit .knob').scrollIntoView({block: 'center'})")
        x, y = tab.value(
            "(b => [b.left + 7, b.top + 7])(document.querySelector('#limit .knob').getBoundingClientRect())"
        )
        tab.mouse("mousePressed", x, y)
        tab.mouse("mouseMoved", 1090, y)
        tab.mouse("mouseReleased", 1090, y)
        assert tab.value("limit") == len(found.limits) - 1

        tab.click("#copy")
        assert tab.value("new Promise(r => setTimeout(() => r(document.getElementById('copied').innerText), 300))")
        assert tab.value("errors") == []
