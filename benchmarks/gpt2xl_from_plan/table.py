"""What GPT-2 XL needed under 12 GiB, planned and measured."""

from pathlib import Path
from typing import Any

RESULT = Path(__file__).with_name("result.json")
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
