"""What a steady step of every technique costs the host, beside the peers' own: some forty seconds on one core."""

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.bench_pages import reason
from benchmarks.runner import Benchmark, Stage, read
from benchmarks.runner import Row as Figures
from benchmarks.step_cost.rows import ROWS, Row, Side
from benchmarks.text import shortened, table

RESULT = "step_cost.json"
MOST = 1.25
"""Python calls of a step, over those of its peer, from which a row needs a reason."""


def measure(row: Row) -> Figures:
    """Every side of a row; one that fails says why."""
    Side("warm-up").cost()  # imports, and kernels that are made once
    return {"sides": [_side(side) for side in (row.ours, *row.peers)]}


def _side(side: Side) -> Figures:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # monitors print a report
            return {"name": side.name, **vars(side.cost())}
    except Exception as error:
        return {"name": side.name, "failed": f"{type(error).__name__}: {error}"[:300]}
    finally:
        sys.setprofile(None)


def _say(row: Figures) -> str:
    return ", ".join(f"{side['name']}: {side.get('calls') or side.get('failed')}" for side in row["sides"])


BENCHMARK = Benchmark(RESULT, lambda options: ROWS, (Stage(lambda case, options, row: measure(case)),), say=_say)


# --- the page ---------------------------------------------------------------------------------------------------------


_HEAD = """# What a steady step costs the host
Generated from `benchmarks/results/step_cost.json` by `python -m benchmarks.pages`; measured by
`python -m benchmarks step_cost`. What runs is in `benchmarks/step_cost/rows.py`.

A GPT-2 of 12 small blocks is trained by Lightning's Trainer on one core; the peers run in the same module and Trainer.
Counted is one step after the first twelve, logging apart: calls of Python functions, operators below autograd (forward,
backward, optimizer step), operators that copy, and reads, which wait for the device (but for AdamW's step counters,
which lie in host memory on any device). On a card small micro-batches are bound by the host: there calls are time.
On the CPU nothing tells which tensors would lie on a device: `.numpy()` or `.tolist()` of what lies on the host, such
as a generator's state, counts as a read, too.
"""


def ratio(ours: Figures, peer: Figures) -> float | None:
    """Python calls of one side over those of another; None where one of them failed."""
    return ours["calls"] / peer["calls"] if "calls" in ours and "calls" in peer else None


def page() -> str:
    """The whole page."""
    record = read(RESULT)
    where = f"{record['hardware']['machine']}, {record['threads']} thread"
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    head = ["row", "", "Python calls", "x peer", "operators", "copies", "reads", "processor ms"]
    lines = [
        _HEAD,
        f"## Over {MOST} times the calls of the peer",
        *(list(_over(record["rows"])) or ["None."]),
        "",
        "## Reads of the device that the peer doesn't make",
        *(list(_more_reads(record["rows"])) or ["None."]),
        "",
        "## All rows",
        table(head, (cells for row in record["rows"] for cells in _cells(row)), right=6),
        "",
        f"{where}; {versions}; commit {record['commit'][:12]}.",
    ]
    return "\n".join(lines) + "\n"


def _over(rows: list[Figures]) -> Iterator[str]:
    for row in rows:
        ours, peer = row["sides"][:2]
        if (times := ratio(ours, peer)) is not None and times > MOST:
            yield f"- {row['name']}: {times:.2f} times {peer['name']}. {reason('step_cost', row['name'])}"


def _more_reads(rows: list[Figures]) -> Iterator[str]:
    for row in rows:
        ours, peer = (Counter(side.get("reads", {})) for side in row["sides"][:2])
        if more := ours - peer:
            counted = ", ".join(f"{count} {what}" for what, count in more.items())
            yield f"- {row['name']}: {counted} more than {row['sides'][1]['name']}."


def _cells(row: dict[str, Any]) -> Iterator[list[str]]:
    for index, side in enumerate(row["sides"]):
        start = ["" if index else row["name"], side["name"]]
        if "failed" in side:
            yield [*start, shortened(side["failed"]), *[""] * 5]
            continue
        times = ratio(row["sides"][0], side) if index else None
        counts = [f"{side['operators']:,}", f"{side['copies']:,}", str(sum(side["reads"].values()))]
        shown = "" if times is None else f"{times:.2f}"
        yield [*start, f"{side['calls']:,}", shown, *counts, f"{side['milliseconds']:.1f}"]
