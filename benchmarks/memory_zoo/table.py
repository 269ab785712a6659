"""Predicted and true peaks of a zoo of modules."""

import os
import statistics
from typing import Any

from benchmarks.marks import RESULTS, by_words
from lightning_memfit.memory import format_bytes

RESULT = RESULTS / "memory_zoo_cpu.json"


def conditions() -> dict[str, str]:
    """Where the figures come from."""
    import torch

    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "not limited")
    return {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "oneDNN": isa}


def apart(row: dict[str, Any]) -> float | None:
    """How far the prediction is from the truth, as a share of it; None where there is none."""
    if "predicted_bytes" not in row or "true_bytes" not in row:
        return None
    return (float(row["predicted_bytes"]) - row["true_bytes"]) / row["true_bytes"]


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of all rows: numbers of rows, and differences as shares of the true peak."""
    found = [difference for row in rows if (difference := apart(row)) is not None]
    sizes = sorted(map(abs, found))
    under = [difference for row in rows if (difference := apart(row)) is not None and not row.get("remarks")]
    return {
        "modules": len(rows),
        "predicted": len(found),
        "median": statistics.median(sizes),
        "p95": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))],
        "worst_under": min(found),
        "worst_under_unnamed": min(under),
        "worst_over": max(found),
        "changed": sum(bool(row.get("changed")) for row in rows),
    }


def text(document: dict[str, Any]) -> str:
    """The summary, the ten modules farthest off, and what is refused, was changed or has a remark."""
    rows, figures = document["rows"], summary(document["rows"])
    where = ", ".join(f"{name} {value}" for name, value in document["conditions"].items())
    lines = [
        f"{figures['modules']} modules, of which {figures['predicted']} were predicted ({where}).",
        "",
        "| of the differences | |",
        "|---|---|",
        f"| median | {figures['median']:.4%} |",
        f"| 95th percentile | {figures['p95']:.3%} |",
        f"| farthest below the truth | {figures['worst_under']:+.3%} |",
        f"| farthest below without a remark | {figures['worst_under_unnamed']:+.3%} |",
        f"| farthest above | {figures['worst_over']:+.2%} |",
        f"| modules that a trace changed | {figures['changed']} |",
        "",
        "The ten farthest from the truth:",
        "",
        "| module | true peak | predicted | difference |",
        "|---|---|---|---|",
        *map(_row, sorted(rows, key=lambda row: -abs(apart(row) or 0))[:10]),
        "",
        *by_words(("refused", row["refused"], row["name"]) for row in rows if "refused" in row),
        *by_words(("remark", remark, row["name"]) for row in rows for remark in row.get("remarks", ())),
        *by_words(("changed", part, row["name"]) for row in rows for part in row.get("changed", ())),
    ]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    true, predicted = format_bytes(row["true_bytes"]), format_bytes(row["predicted_bytes"])
    return f"| {row['name']} | {true} | {predicted} | {apart(row):+.3%} |"
