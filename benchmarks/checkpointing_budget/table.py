"""Write the tables of the technique's page from the results: `python -m benchmarks.checkpointing_budget.table`."""

import json
from pathlib import Path
from typing import Any

from benchmarks.marks import insert
from lightning_memfit.memory import format_bytes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "checkpointing_budget.json"
PAGE = ROOT / "docs" / "techniques" / "activation_checkpointing.md"
MARK = "checkpointing_budget"


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


def main() -> None:
    PAGE.write_text(insert(PAGE.read_text(), MARK, render(json.loads(RESULTS.read_text()))))


if __name__ == "__main__":
    main()
