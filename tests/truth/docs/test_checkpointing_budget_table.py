import json

from benchmarks.checkpointing_budget.table import MARK, PAGE, RESULTS, render
from benchmarks.marks import insert


def test_the_page_shows_the_recorded_figures():
    document = json.loads(RESULTS.read_text())
    page = PAGE.read_text()
    assert insert(page, MARK, render(document)) == page


def test_recorded_peaks_are_within_their_budgets():
    for case in json.loads(RESULTS.read_text())["cases"]:
        assert len(case["rows"]) == 10
        assert all(row["observed_bytes"] <= row["budget_bytes"] for row in case["rows"])
        assert all(row["above_milp"] <= 0.02 for row in case["rows"])
        assert case["solved_s"] <= 1.0
