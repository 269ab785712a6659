"""Write results into `docs/guides/micro_batching.md` and `docs/benchmarks/exactness.md`.

python -m benchmarks.micro_batching.table
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.marks import insert, shortened

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "micro_batching_compare.json"
PAGE = ROOT / "docs" / "guides" / "micro_batching.md"
MARK = "comparison"
EXACTNESS_RESULT = ROOT / "benchmarks" / "results" / "micro_batching_exactness.json"
EXACTNESS_PAGE = ROOT / "docs" / "benchmarks" / "exactness.md"
_OURS, _POWER, _SEARCH = "memfit", "lightning_power", "lightning_binsearch"
_REMARK = 140  # characters


def table() -> str:
    """One row per model: the size found as a share of the true maximum, trial steps, out-of-memory errors."""
    result = json.loads(RESULT.read_text())
    lines = [
        "| model | true maximum | MicroBatching | errors in 50 steps after it | BatchSizeFinder `power` | "
        "BatchSizeFinder `binsearch` |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        others = " | ".join(map(_cell, (row[_POWER], row[_SEARCH])))
        lines.append(f"| {row['model']} | {row['true_maximum']} | {_cell(row[_OURS])} | {_later(row)} | {others} |")
    lines += [
        "",
        "The same for models whose memory is not linear in the batch:",
        "",
        "| model | kind | true maximum | MicroBatching | errors in 50 steps after it | second batch |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["curved"]:
        longer = row.get("true_maximum_of_second_batch")
        second = "the same" if longer is None else f"{row[_OURS]['size_of_second_batch']} of {longer}"
        cells = (row["model"], row["kind"], row["true_maximum"], _cell(row[_OURS]), _later(row), second)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _cell(found: dict[str, Any]) -> str:
    return f"{found['fraction']:.2f} ({found['steps']} steps, {found['errors']} errors)"


def _later(row: dict[str, Any]) -> int:
    return int(row[_OURS]["later_errors"])


def page() -> str:
    """The guide with its table made anew."""
    return insert(PAGE.read_text(), MARK, table())


# --- exactness ------------------------------------------------------------------------------------------------------


def verdicts() -> str:
    """How often each verdict was given, and a table for each theme with a row per case."""
    rows = json.loads(EXACTNESS_RESULT.read_text())["rows"]
    lines = [f"{len(rows)} cases. Training: {_counts(rows, 'training')}. Logged values: {_counts(rows, 'logs')}."]
    for theme in dict.fromkeys(row["theme"] for row in rows):
        lines += [
            f"\n## {theme[0].upper()}{theme[1:]}",
            "| case | | at once | 4 | 3 | 1 | memory ran out | logged values | |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_row(row) for row in rows if row["theme"] == theme),
        ]
    return "\n".join(lines)


def _counts(rows: list[dict[str, Any]], key: str) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(row[key] for row in rows).most_common())


def _row(row: dict[str, Any]) -> str:
    cells = [f"`{row['case']}`", row["title"], *row["runs"].values(), row["logs"].replace("none", ""), _remark(row)]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _remark(row: dict[str, Any]) -> str:
    """Why it was refused, what differs most, or which logged values differ."""
    texts = [text for name, text in row["messages"].items() if row["runs"][name] == row["training"]]
    texts = texts or list(row["messages"].values())
    return shortened(texts[0] if texts else ", ".join(row["logs_differ"]), _REMARK)


def exactness_page() -> str:
    """The page of verdicts with its tables made anew."""
    return insert(EXACTNESS_PAGE.read_text(), "verdicts", verdicts())


if __name__ == "__main__":
    for target, text in ((PAGE, page()), (EXACTNESS_PAGE, exactness_page())):
        target.write_text(text)
        print(f"wrote {target.relative_to(ROOT)}")
