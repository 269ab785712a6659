from benchmarks.checkpointing_budget import RESULT
from benchmarks.runner import read


def test_recorded_peaks_are_within_their_budgets():
    for case in read(RESULT)["rows"]:
        assert len(case["rows"]) == 10
        assert all(row["observed_bytes"] <= row["budget_bytes"] for row in case["rows"])
        assert all(row["above_milp"] <= 0.02 for row in case["rows"])
        assert case["solved_s"] <= 1.0
