"""Plans for activation checkpointing to a budget, by budget."""

from typing import Any

from benchmarks.marks import RESULTS as FOLDER
from lightning_memfit.memory import format_bytes

RESULTS = FOLDER / "checkpointing_budget.json"


def render(document: dict[str, Any]) -> str:
    """Tables of all cases as Markdown."""
    return "\n".join(_table(case) for case in document["cases"])


def _table(case: dict[str, Any]) -> str:
    observed = "executed peak" if case["executed"] else "traced peak"
    lines = [
        f"**{case['name']}**. Without checkpointing {format_bytes(case['plain_peak_bytes'])}. "
        f"{case['num_plans']} plans solved in {1e3 * case['solved_s']:.0f} ms "
        f"after traces of {case['uniform_traces_s']:.1f} s.",
        "",
        f"| budget | predicted peak | {observed} | blocks | more time | above the MILP |",
        "|---|---|---|---|---|---|",
    ]
    for row in case["rows"]:
        counts = ", ".join(f"{count} {choice}" for choice, count in sorted(row["choices"].items()))
        lines.append(
            f"| {format_bytes(row['budget_bytes'])} | {format_bytes(row['predicted_bytes'])} | "
            f"{format_bytes(row['observed_bytes'])} | {counts} | {100 * row['extra_share']:.1f} % | "
            f"{100 * row['above_milp']:.2f} % |"
        )
    return "\n".join([*lines, ""])
