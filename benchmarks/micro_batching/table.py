"""Sizes that searches found, and whether micro-batches are exact."""

from collections import Counter
from typing import Any

from benchmarks.marks import RESULTS, by_words

RESULT = RESULTS / "micro_batching_compare.json"
EXACTNESS_RESULT = RESULTS / "micro_batching_exactness.json"
_OURS, _POWER, _SEARCH = "memfit", "lightning_power", "lightning_binsearch"


def table(result: dict[str, Any]) -> str:
    """The least and the most of sizes found, as shares of the true maximum, of trial steps and of errors."""
    linear, curved = result["rows"], [row for row in result["curved"] if row["kind"] != "untraceable"]
    untraceable = [row for row in result["curved"] if row["kind"] == "untraceable"]
    lines = [
        "| | models | share of the true maximum | steps | errors |",
        "|---|---|---|---|---|",
        _line("`MicroBatching`, memory linear in the batch", linear, _OURS),
        _line("`MicroBatching`, memory not linear, or longer batches later", curved, _OURS),
        _line("`MicroBatching`, steps that can't be traced", untraceable, _OURS),
        _line("`BatchSizeFinder`, `power`, linear", linear, _POWER),
        _line("`BatchSizeFinder`, `binsearch`, linear", linear, _SEARCH),
    ]
    return "\n".join(lines)


def _line(name: str, rows: list[dict[str, Any]], method: str) -> str:
    found = [row[method] for row in rows]
    shares = _span([round(100 * one["fraction"]) for one in found])
    steps, errors = (_span([one[key] for one in found]) for key in ("steps", "errors"))
    return f"| {name} | {len(rows)} | {shares} % | {steps} | {errors} |"


def _span(values: list[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


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
