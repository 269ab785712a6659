import json

from benchmarks.precision.table import RESULTS

DOCUMENT = json.loads(RESULTS.read_text())


def test_lossy_techniques_learn_as_float32_does():
    assert DOCUMENT["steps"] >= 200
    assert DOCUMENT["seeds"] >= 3
    rows = [row for row in DOCUMENT["rows"] if row["technique"] not in ("float32", "bf16-true")]
    assert len(rows) >= 8
    assert all(abs(excess) <= 0.5 for row in rows for excess in row["percent_above_float32"])
