"""Sizes that searches found, and whether micro-batches are exact."""

from collections import Counter
from typing import Any

from benchmarks.marks import RESULTS, by_words

RESULT = RESULTS / "micro_batching_compare.json"
EXACTNESS_RESULT = RESULTS / "micro_batching_exactness.json"
_OURS, _POWER, _SEARCH = "memfit", "lightning_power", "lightning_binsearch"


def table(result: dict[str, Any]) -> str:
    """One row per model: the size found as a share of the true maximum, trial steps, out-of-memory errors."""
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


# --- exactness ------------------------------------------------------------------------------------------------------


def verdicts(document: dict[str, Any]) -> str:
    """How often each verdict was given, by theme, and the words of what isn't equal with its cases."""
    rows = document["rows"]
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
