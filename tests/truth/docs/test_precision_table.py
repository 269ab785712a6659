import json

import pytest

from benchmarks.marks import insert
from benchmarks.precision.table import MARK, PAGES, RESULTS, render

DOCUMENT = json.loads(RESULTS.read_text())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pages_show_the_recorded_losses(path):
    page = path.read_text()
    assert insert(page, MARK, render(DOCUMENT)) == page, "run `python -m benchmarks.precision.table`"


def test_lossy_techniques_learn_as_float32_does():
    assert DOCUMENT["steps"] >= 200
    assert DOCUMENT["seeds"] >= 3
    rows = [row for row in DOCUMENT["rows"] if row["technique"] not in ("float32", "bf16-true")]
    assert len(rows) >= 10
    assert all(abs(excess) <= 0.5 for row in rows for excess in row["percent_above_float32"])
