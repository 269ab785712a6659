"""Verdicts of `python -m tests.zoo --write` on whether micro-batches are exact."""

from collections import Counter
from typing import Any

from benchmarks.text import by_words, table

RESULT = "micro_batching_exactness.json"


def text(document: dict[str, Any]) -> str:
    """How often each verdict was given, by theme, and the words of what isn't equal with its cases."""
    rows, lines = document["rows"], []
    training, logs = (Counter(row[key] for row in rows) for key in ("training", "logs"))
    for theme in dict.fromkeys(row["theme"] for row in rows):
        part = [row for row in rows if row["theme"] == theme]
        of_theme = Counter(row["training"] for row in part)
        cells = [*(of_theme[verdict] for verdict in training), sum(row["logs"] == "warned" for row in part)]
        lines.append([theme, *map(str, cells)])
    return "\n".join(
        [
            f"{len(rows)} cases. Training: {_counted(training)}. Logged values: {_counted(logs)}.",
            "",
            table(["theme", *training, "logged values: warned"], lines),
            "",
            "**Not equal**",
            "",
            *by_words((r["training"], _words(r), f"`{r['case']}`") for r in rows if r["training"] != "equal"),
            *by_words(("warned", ", ".join(r["logs_differ"]), f"`{r['case']}`") for r in rows if r["logs"] == "warned"),
        ]
    )


def _counted(verdicts: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())


def _words(row: dict[str, Any]) -> str:
    """Why it was refused, or what ended it."""
    texts = [text for name, text in row["messages"].items() if row["runs"][name] == row["training"]]
    return next(iter(texts or row["messages"].values()), "cuts change its random numbers")
