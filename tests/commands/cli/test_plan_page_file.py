"""`memfit plan --html`: where the page is written, and where nothing is."""

from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from tests.rules.planner.test_plan_page import explored

PAGE = "<!doctype html>the page"


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """Whether a page was asked for in every planning so far, which this replaces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    Path("recipe.yaml").write_text("seed_everything: 1\n")
    asked: list[bool] = []

    def plan(*_: Any, with_page: bool = False, **__: Any) -> Any:
        asked.append(with_page)
        made = explored(1200)[0].to_dict()
        return {**made, "overlay": {"trainer": {"max_steps": 1}}}, PAGE if with_page else None

    monkeypatch.setattr("cli.plan_recipe.plan_recipe", plan)
    return asked


def run(*arguments: str) -> int:
    return main(["plan", "--config", "recipe.yaml", "--device", "1200MiB", "--host-memory", "8GiB", *arguments])


def test_the_page_and_the_plan_are_written_and_named(planned: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--html", "page.html", "--out", "plan.yaml") == 0
    assert Path("page.html").read_text() == PAGE
    assert "max_steps: 1" in Path("plan.yaml").read_text()
    output = capsys.readouterr().out
    assert "Written: page.html" in output
    assert "Written: plan.yaml" in output
    assert planned == [True]


def test_a_file_that_exists_is_refused_before_planning(planned: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    Path("page.html").write_text("mine")
    assert run("--html", "page.html", "--out", "plan.yaml") == 2
    assert "`--html page.html` exists already. Name another file: none is overwritten." in capsys.readouterr().err
    assert Path("page.html").read_text() == "mine"
    assert not Path("plan.yaml").exists()
    assert planned == []
