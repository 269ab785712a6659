"""Write results into `docs/guides/micro_batching.md` and `docs/benchmarks/exactness.md`.

python -m benchmarks.micro_batching.table
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.marks import by_words, insert

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "micro_batching_compare.json"
PAGE = ROOT / "docs" / "guides" / "micro_batching.md"
MARK = "comparison"
EXACTNESS_RESULT = ROOT / "benchmarks" / "results" / "micro_batching_exactness.json"
EXACTNESS_PAGE = ROOT / "docs" / "benchmarks" / "exactness.md"
_OURS, _POWER, _SEARCH = "memfit", "lightning_power", "lightning_binsearch"


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
    """How often each verdict was given, by theme, and the words of what isn't equal with its cases."""
    rows = json.loads(EXACTNESS_RESULT.read_text())["rows"]
    training, logs = (Counter(row[key] for row in rows) for key in ("training", "logs"))
    lines = [
        f"{len(rows)} cases. Training: {_counted(training)}. Logged values: {_counted(logs)}.",
        "",
        f"| theme | {' | '.join(training)} | logged values: warned |",
        "|---|" + "---|" * (len(training) + 1),
    ]
    for theme in dict.fromkeys(row["theme"] for row in rows):
        part = [row for row in rows if row["theme"] == theme]
        of_theme = Counter(row["training"] for row in part)
        cells = [*(of_theme[verdict] for verdict in training), sum(row["logs"] == "warned" for row in part)]
        lines.append(f"| {theme} | {' | '.join(map(str, cells))} |")
    lines += ["", "**Not equal**", ""]
    lines += by_words((row["training"], _words(row), f"`{row['case']}`") for row in rows if row["training"] != "equal")
    lines += by_words(
        ("warned", ", ".join(row["logs_differ"]), f"`{row['case']}`") for row in rows if row["logs"] == "warned"
    )
    return "\n".join(lines)


def _counted(verdicts: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())


def _words(row: dict[str, Any]) -> str:
    """Why it was refused, or what ended it."""
    texts = [text for name, text in row["messages"].items() if row["runs"][name] == row["training"]]
    return next(iter(texts or row["messages"].values()), "cuts change its random numbers")


def exactness_page() -> str:
    """The page of verdicts with its tables made anew."""
    return insert(EXACTNESS_PAGE.read_text(), "verdicts", verdicts())


if __name__ == "__main__":
    for target, text in ((PAGE, page()), (EXACTNESS_PAGE, exactness_page())):
        target.write_text(text)
        print(f"wrote {target.relative_to(ROOT)}")
