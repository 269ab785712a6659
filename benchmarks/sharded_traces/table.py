"""Write the page from the results: `python -m benchmarks.sharded_traces.table`."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.marks import insert
from benchmarks.memory_zoo.table import apart
from lightning_memfit.memory import format_bytes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "sharded_traces.md"
RESULT = ROOT / "benchmarks" / "results" / "sharded_traces_cpu.json"


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
    """Rows of torch's strategies and of DeepSpeed's."""
    zero = [row for row in rows if ", zero " in row["name"]]
    return {"torch's strategies": [row for row in rows if row not in zero], "DeepSpeed": zero}


def text() -> str:
    """The summary, and a row for each run."""
    document = json.loads(RESULT.read_text())
    rows = document["rows"]
    parts = groups(rows)
    figures = [summary(part) for part in parts.values()]
    runs, compared = (sum(int(found[key]) for found in figures) for key in ("runs", "compared"))
    lines = [
        f"{runs} runs, of which {compared} are compared (torch {document['versions']['torch']}).",
        "",
        f"| of the differences | {' | '.join(parts)} |",
        f"|---|{'---|' * len(parts)}",
        f"| runs | {' | '.join(str(found['runs']) for found in figures)} |",
        f"| median | {' | '.join(format(found['median'], '.3%') for found in figures)} |",
        f"| farthest | {' | '.join(format(found['farthest'], '.2%') for found in figures)} |",
        f"| farthest below the truth | "
        f"{' | '.join(format(min(0.0, found['worst_under']), '+.3%') for found in figures)} |",
        "",
        "| run | true peak | predicted | difference | peak in |",
        "|---|---|---|---|---|",
        *map(_row, rows),
    ]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    difference = apart(row)
    true = format_bytes(row["true_bytes"]) if "true_bytes" in row else row.get("failed", "")
    predicted = format_bytes(row["predicted_bytes"]) if "predicted_bytes" in row else f"refused: {row['refused'][:160]}"
    share = f"{difference:+.3%}" if difference is not None else ""
    return f"| {row['name']} | {true} | {predicted} | {share} | {row.get('phase', '')} |"


def page() -> str:
    """The page with its table made anew."""
    return insert(PAGE.read_text(), "sharded_traces", text())


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
