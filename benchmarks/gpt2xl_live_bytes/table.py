"""Live bytes of GPT-2 XL, predicted and measured."""

from pathlib import Path
from typing import Any

RESULT = Path(__file__).with_name("result.json")
GIB = 1 << 30


def render(document: dict[str, Any]) -> str:
    """One row per case: predicted and measured peaks of live bytes, and the largest resident set, in GiB."""
    lines = ["| | predicted GiB | measured GiB | largest resident set |", "|---|---:|---:|---:|"]
    for case in document["cases"]:
        cells = (case[f"{key}_bytes"] / GIB for key in ("predicted", "measured", "peak_rss"))
        lines.append(f"| {case['name']} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)
