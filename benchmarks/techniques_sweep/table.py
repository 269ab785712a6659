"""Write the pages of both sweeps from their results: `python -m benchmarks.techniques_sweep.table`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.marks import insert, shortened
from benchmarks.techniques_sweep.architectures import RESULT as ARCHITECTURES
from benchmarks.techniques_sweep.architectures import TECHNIQUES
from benchmarks.techniques_sweep.combinations import RESULT as COMBINATIONS

ROOT = Path(__file__).parents[2]
ARCHITECTURES_PAGE = ROOT / "docs" / "benchmarks" / "architectures.md"
COMBINATIONS_PAGE = ROOT / "docs" / "benchmarks" / "combinations.md"

# --- architectures --------------------------------------------------------------------------------------------------


def architectures() -> str:
    """How often each verdict was given, a row per architecture, the refusals' words, and what can't be built."""
    rows = json.loads(ARCHITECTURES.read_text())["rows"]
    built = [row for row in rows if "verdicts" in row]
    lines = [
        f"{len(built)} of {len(rows)} architectures build small.",
        "",
        "| technique | " + " | ".join(_VERDICTS) + " | largest difference where equal |",
        "|---|" + "---|" * (len(_VERDICTS) + 1),
        *(_counts(technique, built) for technique in TECHNIQUES),
        "",
        "| model | " + " | ".join(TECHNIQUES) + " |",
        "|---|" + "---|" * len(TECHNIQUES),
        *(f"| `{row['model']}` | " + " | ".join(_cell(row["verdicts"].get(t)) for t in TECHNIQUES) + " |"
          for row in built),
        "",
        "## In words",
        *(line for technique in TECHNIQUES for line in _words(technique, built)),
        "",
        "## Not built",
        *(f"- `{row['model']}`: {shortened(row['not_built'])}" for row in rows if "not_built" in row),
    ]  # fmt: skip
    return "\n".join(lines)


_VERDICTS = ("equal", "refused", "crashed", "different")


def _counts(technique: str, rows: list[dict[str, Any]]) -> str:
    found = [row["verdicts"][technique] for row in rows if technique in row["verdicts"]]
    counts = Counter(one["verdict"] for one in found)
    apart = [max(float(one["losses"]), float(one["weights"])) for one in found if one["verdict"] == "equal"]
    cells = [str(counts[verdict]) for verdict in _VERDICTS] + [f"{max(apart, default=0.0):.0e}"]
    return f"| {technique} | {' | '.join(cells)} |"


def _cell(verdict: dict[str, Any] | None) -> str:
    return "" if verdict is None else str(verdict["verdict"])


def _words(technique: str, rows: list[dict[str, Any]]) -> list[str]:
    """The words of what isn't equal, each once with its models."""
    models: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        verdict = row["verdicts"].get(technique, {"verdict": "equal"})
        if verdict["verdict"] != "equal":
            words = verdict.get("words", "").replace(row["class"], "The model")
            models.setdefault((verdict["verdict"], shortened(words)), []).append(f"`{row['model']}`")
    lines = [f"- {verdict}: {words} ({', '.join(names)})" for (verdict, words), names in models.items()]
    return ["", f"### {technique}", *lines] if lines else []


def architectures_page() -> str:
    """The page with its tables made anew."""
    return insert(ARCHITECTURES_PAGE.read_text(), "verdicts", architectures())


# --- combinations ---------------------------------------------------------------------------------------------------


def combinations() -> str:
    """How often each verdict was given, the tolerances, and a row per seed."""
    document = json.loads(COMBINATIONS.read_text())
    rows = document["rows"]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(r["verdict"] for r in rows).most_common())
    tolerances = ", ".join(f"`{name}` {value:g}" for name, value in document["tolerances"].items())
    lines = [
        f"{len(rows)} combinations: {counts}. Tolerances: {tolerances}.",
        "",
        "| seed | module | techniques | | verdict | largest difference | |",
        "|---|---|---|---|---|---|---|",
        *map(_row, rows),
    ]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    techniques = [f"`{name}`{_options(options)}" for name, options in row.get("techniques", {}).items()]
    trainer = _options(row.get("trainer", {}))
    apart = f"{row['difference']:g} of {row['tolerance']:g}" if "difference" in row else ""
    remark = shortened(row.get("words", "").partition(": ")[2]) if row["verdict"] != "equal" else ""
    cells = (row["seed"], row["module"], ", ".join(techniques), trainer.strip(), row["verdict"], apart, remark)
    return "| " + " | ".join(map(str, cells)) + " |"


def _options(options: dict[str, Any]) -> str:
    return " " + ", ".join(f"{name}={value}" for name, value in options.items()) if options else ""


def combinations_page() -> str:
    """The page with its table made anew."""
    return insert(COMBINATIONS_PAGE.read_text(), "verdicts", combinations())


if __name__ == "__main__":
    for target, text in ((ARCHITECTURES_PAGE, architectures_page()), (COMBINATIONS_PAGE, combinations_page())):
        target.write_text(text)
        print(f"wrote {target.relative_to(ROOT)}")
