"""Write what GPT-2 XL needed under 12 GiB into the plan guide: `python -m benchmarks.gpt2xl_from_plan.table`."""

import json
from pathlib import Path
from typing import Any

from benchmarks.marks import insert
from benchmarks.planner.table import PAGE

RESULT = Path(__file__).with_name("result.json")
MARK = "from the plan"
GIB = 1 << 30


def render(document: dict[str, Any]) -> str:
    """The plan and the run, in GiB."""
    seconds = ", ".join(f"{step['step_seconds']:.0f}" for step in document["optimizer_steps"])
    rows = [
        ("plan", document["setting"]),
        ("predicted peak", f"{document['predicted_bytes'] / GIB:.2f} GiB"),
        ("measured peak of the run", f"{document['measured_bytes'] / GIB:.2f} GiB"),
        ("largest resident set", f"{document['peak_rss_bytes'] / GIB:.2f} GiB"),
        ("seconds of the optimizer steps", seconds),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def page() -> str:
    """The page with its table made anew."""
    return insert(PAGE.read_text(), MARK, render(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    PAGE.write_text(page())
