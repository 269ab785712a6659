"""The page of step costs."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.marks import RESULTS, shortened
from benchmarks.notes import reason

RESULT = RESULTS / "step_cost.json"
MOST = 1.25
"""Python calls of a step, over those of its peer, from which a row needs a reason."""

_HEAD = """# What a steady step costs the host
Generated from `benchmarks/results/step_cost.json` by `python -m benchmarks.pages`; measured by
`python -m benchmarks.step_cost.run`. What runs is in `benchmarks/step_cost/rows.py`.

A GPT-2 of 12 small blocks is trained by Lightning's Trainer on one core; the peers run in the same module and Trainer.
Counted is one step after the first twelve, logging apart: calls of Python functions, operators below autograd (forward,
backward, optimizer step), operators that copy, and reads, which wait for the device (but for AdamW's step counters,
which lie in host memory on any device). On a card small micro-batches are bound by the host: there calls are time.
On the CPU nothing tells which tensors would lie on a device: `.numpy()` or `.tolist()` of what lies on the host, such
as a generator's state, counts as a read, too.
"""


def ratio(row: dict[str, Any]) -> float | None:
    """Python calls of ours over those of the first peer; None where one of them failed."""
    ours, peer = row["sides"][:2]
    return ours["calls"] / peer["calls"] if "calls" in ours and "calls" in peer else None


def page() -> str:
    """The whole page."""
    record = json.loads(RESULT.read_text())
    where = f"{record['hardware']['machine']}, {record['threads']} thread"
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    lines = [
        _HEAD,
        f"## Over {MOST} times the calls of the peer",
        *(list(_over(record["rows"])) or ["None."]),
        "",
        "## Reads of the device that the peer doesn't make",
        *(list(_more_reads(record["rows"])) or ["None."]),
        "",
        "## All rows",
        "| row | | Python calls | x peer | operators | copies | reads | processor ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(line for row in record["rows"] for line in _lines(row)),
        "",
        f"{where}; {versions}; commit {record['commit'][:12]}.",
    ]
    return "\n".join(lines) + "\n"


def _over(rows: list[dict[str, Any]]) -> Iterator[str]:
    found = {row["name"]: times for row in rows if (times := ratio(row)) is not None and times > MOST}
    for row in rows:
        if row["name"] in found:
            peer = row["sides"][1]["name"]
            yield f"- {row['name']}: {found[row['name']]:.2f} times {peer}. {reason('step_cost', row['name'])}"


def _more_reads(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        ours, peer = (Counter(side.get("reads", {})) for side in row["sides"][:2])
        if more := ours - peer:
            yield f"- {row['name']}: {_counted(more)} more than {row['sides'][1]['name']}."


def _counted(reads: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in reads.items()) or "0"


def _lines(row: dict[str, Any]) -> Iterator[str]:
    for index, side in enumerate(row["sides"]):
        name = "" if index else row["name"]
        if "failed" in side:
            yield f"| {name} | {side['name']} | {shortened(side['failed'])} | | | | | |"
            continue
        times = ratio({"sides": [row["sides"][0], side]}) if index else None
        yield (
            f"| {name} | {side['name']} | {side['calls']:,} | {'' if times is None else f'{times:.2f}'} | "
            f"{side['operators']:,} | {side['copies']:,} | {sum(side['reads'].values())} | {side['milliseconds']:.1f} |"
        )
