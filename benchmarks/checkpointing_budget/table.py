"""Plans for activation checkpointing to a budget, by budget."""

from typing import Any

from benchmarks.marks import RESULTS as FOLDER
from lightning_memfit.memory import format_bytes

RESULTS = FOLDER / "checkpointing_budget.json"


def render(document: dict[str, Any]) -> str:
    """What all cases say together, and every third row of the last one."""
    rows = [row for case in document["cases"] for row in case["rows"]]
    names = "; ".join(case["name"] for case in document["cases"])
    solved = max(case["solved_s"] for case in document["cases"])
    above = max(row["above_milp"] for row in rows)
    lines = [
        f"{len(rows)} budgets ({names}): no peak exceeds its budget. All plans of a case are solved in at most "
        f"{1e3 * solved:.0f} ms, and none takes over {100 * above:.2f} % more time than the bound of a mixed-integer "
        f"program (`benchmarks/results/{RESULTS.name}`, by `{document['command']}`). Of the last case:",
        "",
        "| budget | peak | blocks | more time |",
        "|---|---|---|---|",
    ]
    for row in document["cases"][-1]["rows"][::3]:
        counts = ", ".join(f"{count} {choice}" for choice, count in sorted(row["choices"].items()))
        sizes = " | ".join(format_bytes(row[f"{name}_bytes"]) for name in ("budget", "observed"))
        lines.append(f"| {sizes} | {counts} | {100 * row['extra_share']:.1f} % |")
    return "\n".join(lines)
