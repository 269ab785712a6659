"""Cases of faults name tests that exist, and their page says what the last run of them found."""

import ast
import json
from pathlib import Path

from tests.faults import PAGE, RESULTS, Case, cases, page

ROOT = Path(__file__).parents[3]


def test_every_case_names_a_test() -> None:
    for case in cases():
        file, _, function = case.test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, case


def test_the_page_is_what_the_last_run_gives() -> None:
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    assert PAGE.read_text() == page(record), "run `python -m tests.faults --page`"


def test_nothing_failed_in_the_last_run() -> None:
    record = json.loads(RESULTS.read_text())
    assert [row["test"] for row in record["rows"]] == [case.test for case in cases()]
    assert [row["test"] for row in record["rows"] if row["failed"] or not row["passed"]] == []


def test_a_case_that_failed_is_shown() -> None:
    first: Case = cases()[0]
    row = {"test": first.test, "passed": 2, "failed": 1, "skipped": 0}
    record = {"rows": [row], "seconds": 60, "hardware": {"cores": 2}, "versions": {"torch": "2.13.0"}}
    assert f"`{first.test}`: **1 failed**" in page(record)
    assert "not run" in page(None)
