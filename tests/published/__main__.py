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
SECONDS = 150.0
"""Time of one trial; some 5 on an idle core."""

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


def table(rows: dict[str, Row]) -> str:
    """All verdicts, and then the first line of every refusal."""
    cases = [case for case in CASES if case.name in rows]
    lines = ["# Published modules", "", "`python -m tests.published --write` writes this file. Words are those of"]
    lines += ["`tests/published/trial.py`.", ""]
    lines += [_line("module", "package", *WANTED), "|---" * (2 + len(WANTED)) + "|"]
    for case in cases:
        lines.append(_line(case.name, f"{case.package} {case.version}", *(v for v, _ in rows[case.name].values())))
    lines += ["", "## Refusals and remarks", ""]
    for case in cases:
        said = [
            f"- {technique}: {message.splitlines()[0].replace('|', '/')}"
            for technique, (verdict, message) in rows[case.name].items()
            if message and verdict not in ("peak", "trains", "fits")
        ]
        lines += [f"### {case.name}", "", *said, ""] if said else []
    return "\n".join(lines).rstrip() + "\n"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def read_table() -> dict[str, dict[str, str]]:
    """Verdicts of the written table, by module and technique."""
    if not TABLE.exists():
        return {}
    cells = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: dict(zip(WANTED, row[2:], strict=True)) for row in cells[1:]}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="names of modules")
    parser.add_argument("--write", action="store_true", help="write the table; only with every module")
    chosen = parser.parse_args(arguments)
    if chosen.write and chosen.only:
        parser.error("--write needs every module: leave out --only.")
    rows, written, moved = {}, read_table(), 0
    for case in CASES:
        if chosen.only and case.name not in chosen.only:
            continue
        rows[case.name] = row = try_case(case)
        print(f"{case.name} ({case.package} {case.version})", flush=True)
        for technique, (verdict, message) in row.items():
            wanted, before = case.all_wanted[technique], written.get(case.name, {}).get(technique, verdict)
            is_installed = verdict != "not installed"
            moved += is_installed and verdict != before
            mark = "" if not is_installed or is_met(wanted, verdict, message) else f"   wanted: {wanted}"
            mark += f"   before: {before}" if is_installed and verdict != before else ""
            print(f"  {technique}: {verdict}{mark}{f' | {message}' if message else ''}", flush=True)
    met = [is_met(case.all_wanted[t], *found) for case in CASES for t, found in rows.get(case.name, {}).items()]
    print(f"{sum(met)} of {len(met)} verdicts as wanted, {moved} moved")
    if chosen.write:
        TABLE.write_text(table(rows))
        return 0
    return int(moved > 0)


if __name__ == "__main__":
    sys.exit(main())
