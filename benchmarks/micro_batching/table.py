"""Write the comparison into `docs/guides/micro_batching.md`: `python -m benchmarks.micro_batching.table`."""

import json
from pathlib import Path

from benchmarks.marks import insert

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "micro_batching_compare.json"
PAGE = ROOT / "docs" / "guides" / "micro_batching.md"
MARK = "comparison"
_OURS, _POWER, _SEARCH = "memfit", "lightning_power", "lightning_binsearch"


def table() -> str:
    """One row per model: the size found as a share of the true maximum, trial steps, out-of-memory errors."""
    rows = json.loads(RESULT.read_text())["rows"]
    lines = [
        "| model | true maximum | MicroBatching | BatchSizeFinder `power` | BatchSizeFinder `binsearch` |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"{row[name]['fraction']:.2f} ({row[name]['steps']} steps, {row[name]['errors']} errors)"
            for name in (_OURS, _POWER, _SEARCH)
        ]
        lines.append(f"| {row['model']} | {row['true_maximum']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """The page with its table made anew."""
    return insert(PAGE.read_text(), MARK, table())


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
