from benchmarks.precision import RESULT
from benchmarks.runner import read

DOCUMENT = read(RESULT)


def test_lossy_techniques_learn_as_float32_does():
    assert DOCUMENT["steps"] >= 200
    assert DOCUMENT["seeds"] >= 3
    rows = [row for row in DOCUMENT["rows"] if row["technique"] not in ("float32", "bf16-true")]
    assert len(rows) >= 8
    assert all(abs(excess) <= 0.5 for row in rows for excess in row["percent_above_float32"])
