"""Predicted and true peaks of ranks."""

import re
import statistics
from typing import Any

from benchmarks.marks import RESULTS, by_words
from benchmarks.memory_zoo.table import apart
from lightning_memfit.memory import format_bytes

RESULT = RESULTS / "sharded_traces_cpu.json"


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of all rows: numbers of rows, and differences as shares of the true peak."""
    found = [difference for row in rows if (difference := apart(row)) is not None]
    return {
        "runs": len(rows),
        "compared": len(found),
        "median": statistics.median(map(abs, found)),
        "farthest": max(map(abs, found)),
        "worst_under": min(found),
    }


def groups(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of all of torch's strategies, and of all of DeepSpeed's."""
    zero = [row for row in rows if ", zero " in row["name"]]
    return {"all of torch's": [row for row in rows if row not in zero], "all of DeepSpeed's": zero}


def text(document: dict[str, Any]) -> str:
    """The summary, and the ten runs whose predictions are farthest off."""
    rows = document["rows"]
    parts = groups(rows)
    lines = [
        f"{len(rows)} runs (torch {document['versions']['torch']}).",
        "",
        "| strategy | runs | median difference | farthest | farthest below the truth |",
        "|---|---|---|---|---|",
        *(_summed(name, part) for name, part in {**_strategies(rows), **parts}.items()),
        "",
        "The ten farthest from the truth:",
        "",
        "| run | true peak | predicted | difference | peak in |",
        "|---|---|---|---|---|",
        *map(_row, sorted(rows, key=lambda row: -abs(apart(row) or 0))[:10]),
        "",
        *by_words(("refused", row["refused"], row["name"]) for row in rows if "refused" in row),
        *by_words(("failed", row["failed"], row["name"]) for row in rows if "failed" in row),
    ]
    return "\n".join(lines)


def _strategies(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by the strategy in their names, such as `GPT-2, zero 2 offload, 2 ranks, rank 1`, whatever it offloads."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = re.sub(r"^(zero \w+) .*", r"\1", row["name"].split(", ")[1])
        found.setdefault(f"`{name}`", []).append(row)
    return found


def _summed(name: str, rows: list[dict[str, Any]]) -> str:
    found = summary(rows)
    under = min(0.0, found["worst_under"])
    return f"| {name} | {found['runs']} | {found['median']:.3%} | {found['farthest']:.2%} | {under:+.3%} |"


def _row(row: dict[str, Any]) -> str:
    true, predicted = format_bytes(row["true_bytes"]), format_bytes(row["predicted_bytes"])
    return f"| {row['name']} | {true} | {predicted} | {apart(row):+.3%} | {row['phase']} |"
