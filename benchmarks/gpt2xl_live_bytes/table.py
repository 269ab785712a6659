"""Write the table of live bytes into its guide: `python -m benchmarks.gpt2xl_live_bytes.table`."""

import json
from pathlib import Path
from typing import Any

from benchmarks.marks import insert

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("result.json")
PAGE = ROOT / "docs" / "guides" / "one_card.md"
MARK = "live bytes"
GIB = 1 << 30


def render(document: dict[str, Any]) -> str:
    """One row per case: predicted and measured peaks of live bytes, and the largest resident set, in GiB."""
    lines = ["| | predicted GiB | measured GiB | largest resident set |", "|---|---:|---:|---:|"]
    for case in document["cases"]:
        cells = (case[f"{key}_bytes"] / GIB for key in ("predicted", "measured", "peak_rss"))
        lines.append(f"| {case['name']} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def page() -> str:
    """The page with its table made anew."""
    return insert(PAGE.read_text(), MARK, render(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    PAGE.write_text(page())
