"""Try five techniques on published modules, and compare the verdicts with the table.

    python -m tests.published [--only NAME ...] [--write]

Every package is imported in a process of its own, and every trial runs in a fork of it that is ended after its time.
Exits with 1 if a verdict isn't that of `tests/published/verdicts.md`, which `--write` writes. Packages that aren't
installed are named and left out; `make nightly` installs those of `requirements.txt` into `.venv-published`.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.published.cases import CASES
from tests.published.trial import TECHNIQUES, WANTED, Case, is_met, trials
from tests.zoo.__main__ import try_all
from tests.zoo.trial import Trial

TABLE = Path(__file__).parent / "verdicts.md"
SECONDS = 200.0
"""Time of one trial. `MemFit` traces a step some dozens of times."""

Row = dict[str, tuple[str, str]]
"""Verdicts and messages by technique."""


def examine(case: Case) -> tuple[str, dict[str, Any]]:
    """Import the package of a module, and try everything on it."""
    torch.set_num_threads(1)
    try:
        case.build()
    except Exception as error:
        traceback.print_exc()
        return f"the package fails: {type(error).__name__}: {error}", {}
    made = [Trial(case.name, "", name, "", case.package, run, SECONDS) for name, run in trials(case).items()]
    found = try_all(made)
    return "tried", {one.tried: [found[one.key][0], (found[one.key][1] or {}).get("message", "")] for one in made}


def try_case(case: Case) -> Row:
    """Verdicts on a module; every one says why if there are none."""
    if case.version is None:
        return dict.fromkeys(TECHNIQUES, ("not installed", ""))
    outer = Trial(case.name, "", "import", "", case.package, lambda: examine(case), 300 + len(TECHNIQUES) * SECONDS)
    verdict, row = try_all([outer])[outer.key]
    if not row:
        return dict.fromkeys(TECHNIQUES, (verdict, ""))
    return {technique: (found[0], found[1]) for technique, found in row.items()}


def table(rows: dict[str, tuple[str, Row]]) -> str:
    """All verdicts, and then what was said: the first lines of refusals, and what differs.

    Args:
        rows: Package with version, and what was found, by module.
    """
    lines = ["# Published modules", "", "`python -m tests.published --write` writes this file. Words are those of"]
    lines += ["`tests/published/trial.py`.", ""]
    lines += [_line("module", "package", *WANTED), "|---" * (2 + len(WANTED)) + "|"]
    lines += [_line(name, package, *(verdict for verdict, _ in row.values())) for name, (package, row) in rows.items()]
    for name, (_, row) in rows.items():
        said = [f"- {technique}: {_first_line(one)}" for technique, one in row.items() if _first_line(one)]
        lines += ["", f"## {name}", "", *said] if said else []
    return "\n".join(lines) + "\n"


def _first_line(found: tuple[str, str]) -> str:
    verdict, message = found
    return "" if verdict in ("peak", "trains", "fits") else message.split("\n")[0].replace("|", "/")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def read_table() -> dict[str, tuple[str, Row]]:
    """What `table` was made of."""
    found: dict[str, tuple[str, Row]] = {}
    name = ""
    for line in TABLE.read_text().splitlines() if TABLE.exists() else []:
        if line.startswith("| ") and not line.startswith("| module |"):
            module, package, *verdicts = line.strip("| ").split(" | ")
            found[module] = package, {technique: (one, "") for technique, one in zip(WANTED, verdicts, strict=True)}
        elif line.startswith("## "):
            name = line[3:]
        elif line.startswith("- "):
            technique, message = line[2:].split(": ", 1)
            row = found[name][1]
            row[technique] = row[technique][0], message
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="names of modules")
    parser.add_argument("--write", action="store_true", help="write the verdicts into the table")
    chosen = parser.parse_args(arguments)
    written, met, moved = read_table(), [], 0
    for case in CASES:
        if chosen.only and case.name not in chosen.only:
            continue
        row = try_case(case)
        before = written.get(case.name, ("", row))[1]
        print(f"{case.name} ({case.package} {case.version})", flush=True)
        for technique, (verdict, message) in row.items():
            wanted = case.all_wanted[technique]
            met.append(is_met(wanted, verdict, message))
            mark = "" if met[-1] or case.version is None else f"   wanted: {wanted}"
            if case.version is not None and verdict != before[technique][0]:
                moved, mark = moved + 1, f"{mark}   before: {before[technique][0]}"
            print(f"  {technique}: {verdict}{mark}{f' | {message}' if message else ''}", flush=True)
        if chosen.write and case.version is not None:
            written[case.name] = f"{case.package} {case.version}", row
            TABLE.write_text(table({one.name: written[one.name] for one in CASES if one.name in written}))
    print(f"{sum(met)} of {len(met)} verdicts as wanted, {moved} moved")
    return int(moved > 0 and not chosen.write)


if __name__ == "__main__":
    sys.exit(main())
