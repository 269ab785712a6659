"""Verdicts of both sweeps."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.marks import by_words
from benchmarks.techniques_sweep.architectures import TECHNIQUES

# --- architectures --------------------------------------------------------------------------------------------------


def architectures(document: dict[str, Any]) -> str:
    """How often each verdict was given, the words of what isn't equal, and what can't be built."""
    rows = document["rows"]
    built = [row for row in rows if "verdicts" in row]
    lines = [
        f"{len(built)} of {len(rows)} architectures build small.",
        "",
        "| technique | " + " | ".join(_VERDICTS) + " | largest difference where equal |",
        "|---|" + "---|" * (len(_VERDICTS) + 1),
        *(_counts(technique, built) for technique in TECHNIQUES),
        *_not_equal(built),
        "",
        "## Not built",
        ", ".join(f"`{row['model']}`" for row in rows if "not_built" in row) + ": the results say why.",
    ]
    return "\n".join(lines)


_VERDICTS = ("equal", "refused", "crashed", "different")


def _counts(technique: str, rows: list[dict[str, Any]]) -> str:
    found = [row["verdicts"][technique] for row in rows if technique in row["verdicts"]]
    counts = Counter(one["verdict"] for one in found)
    apart = [max(float(one["losses"]), float(one["weights"])) for one in found if one["verdict"] == "equal"]
    cells = [str(counts[verdict]) for verdict in _VERDICTS] + [f"{max(apart, default=0.0):.0e}"]
    return f"| {technique} | {' | '.join(cells)} |"


def _not_equal(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The words of what isn't equal; techniques that have the same ones stand together."""
    found: dict[tuple[str, ...], list[str]] = {}
    for technique in TECHNIQUES:
        items = by_words(
            (verdict["verdict"], verdict.get("words", "").replace(row["class"], "The model"), f"`{row['model']}`")
            for row in rows
            if (verdict := row["verdicts"].get(technique, {"verdict": "equal"}))["verdict"] != "equal"
        )
        found.setdefault(tuple(items), []).append(technique)
    for items_of, techniques in found.items():
        if items_of:
            yield from ("", f"**{'; '.join(techniques)}**", "", *items_of)


# --- combinations ---------------------------------------------------------------------------------------------------


def combinations(document: dict[str, Any]) -> str:
    """How often each verdict was given, by technique, the tolerances, and the words of what isn't equal."""
    rows = document["rows"]
    not_equal = [row for row in rows if row["verdict"] != "equal"]
    counts = Counter(row["verdict"] for row in rows)
    tolerances = ", ".join(f"`{name}` {value:g}" for name, value in document["tolerances"].items())
    techniques = sorted({name for row in rows for name in row.get("techniques", ())})
    lines = [
        f"{len(rows)} combinations: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}. "
        f"Tolerances: {tolerances}.",
        "",
        f"| technique | {' | '.join(counts)} | largest difference, of its tolerance |",
        "|---|" + "---|" * (len(counts) + 1),
        *(
            _of_technique(name, [row for row in rows if name in row.get("techniques", ())], counts)
            for name in techniques
        ),
        "",
        "**Not equal**",
        "",
        *by_words(((row["verdict"], row["words"].partition(": ")[2], "") for row in not_equal), counted=True),
    ]
    return "\n".join(lines)


def _of_technique(name: str, rows: list[dict[str, Any]], verdicts: Iterable[str]) -> str:
    counts = Counter(row["verdict"] for row in rows)
    shares = [row["difference"] / row["tolerance"] for row in rows if row["verdict"] == "equal"]
    cells = [str(counts[verdict]) for verdict in verdicts] + [f"{max(shares):.0%}" if shares else ""]
    return f"| `{name}` | {' | '.join(cells)} |"
