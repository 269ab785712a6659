"""Pages made from results say what the results say."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_accuracy_page_is_what_its_results_give() -> None:
    from benchmarks.estimator.table import PAGE, page

    assert PAGE.read_text() == page(), "run `python -m benchmarks.estimator.table`"


def test_estimates_on_the_cpu_keep_their_bar() -> None:
    from benchmarks.estimator.table import summary

    document = json.loads((ROOT / "benchmarks/results/estimator_cpu.json").read_text())
    assert not [row["name"] for row in document["rows"] if "failed" in row]
    figures = summary([row["error_allocated"] for row in document["rows"]])
    assert figures["runs"] >= 30
    assert figures["median"] <= 0.01
    assert figures["max"] <= 0.03
    assert figures["under"] <= 0.01


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.name)
def test_every_result_names_its_command_and_versions(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document.get("command")
    assert "torch" in document.get("versions", {})
