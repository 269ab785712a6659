"""Undo what was mended once, fault by fault, and find the test that notices it.

Each patch of this folder brings one fault back that an older CHANGELOG lists as mended. A patch runs the tests that
execute its lines, nearest first, until one fails:

    python -m tests.net --record FOLDER               # all patches: tests/net/results.json, and tests/net.md
    python -m tests.net --record FOLDER --only 07 12  # these; the others stay as they were
    python -m tests.net --page                        # only the page

FOLDER is what `tests.net.record` wrote about the same commit. Patches are applied in a worktree of
their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.net.lines import ROOT, lines_of, seconds_of

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
PAGE = ROOT / "tests" / "net.md"
SECONDS = 180.0
"""How long a suite is asked about one patch."""

_HUNK = re.compile(r"^@@ -(\d+)")


@dataclass(frozen=True)
class Patch:
    """A fault to bring back.

    Attributes:
        name: Number and name of its file.
        entry: What the CHANGELOG said when it was mended.
        test: The test that is known to have noticed it.
        lines: The lines that it changes or stands beside, by file.
    """

    name: str
    entry: str
    test: str
    lines: dict[str, set[int]]

    @property
    def path(self) -> Path:
        """Its file."""
        return FOLDER / f"{self.name}.patch"


def read(path: Path) -> Patch:
    """The patch of a file."""
    entry, test, lines, file, number = "", "", defaultdict[str, set[int]](set), "", 0
    for line in path.read_text().splitlines():
        if line.startswith("Entry: "):
            entry = line.removeprefix("Entry: ")
        elif line.startswith("Test: "):
            test = line.removeprefix("Test: ")
        elif line.startswith("--- a/"):
            file = line.removeprefix("--- a/")
        elif hunk := _HUNK.match(line):
            number = int(hunk[1])
        elif line.startswith("-"):
            lines[file].add(number)
            number += 1
        elif line.startswith("+") and not line.startswith("+++"):
            lines[file] |= {number - 1, number}
        elif line.startswith(" "):
            number += 1
    return Patch(path.stem, entry, test, dict(lines))


class Record:
    """Which tests passed when they were recorded, how long they took, and what they executed."""

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        failed = set()
        for test, outcome, seconds in seconds_of(folder):
            self.seconds[test] += seconds
            if outcome != "passed":
                failed.add(test)
        self.reached: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.size: Counter[str] = Counter()
        for test, file, line in lines_of(folder):
            if test in self.seconds and test not in failed:
                self.reached[file, line].add(test)
                self.size[test] += 1

    def near(self, patch: Patch) -> list[str]:
        """The test that is known, then those that execute a line of `patch`: first those of the same module, then those
        that execute least.
        """
        found: set[str] = set()
        for file, lines in patch.lines.items():
            found.update(*(self.reached[file, line] for line in lines))
        if not found:  # lines that run when the module is imported
            for file in patch.lines:
                found.update(*(tests for (other, _), tests in self.reached.items() if other == file))
        others = {test for test in found if test.partition("[")[0] != patch.test}
        return [patch.test, *sorted(others, key=lambda test: (-_likeness(test, patch), self._cost(test), test))]

    def _cost(self, test: str) -> float:
        return self.seconds[test] + self.size[test] / 1e4


def _likeness(test: str, patch: Patch) -> int:
    """How much of the path of a test is that of the files of `patch`."""
    parts = set(Path(test.partition("::")[0].replace("test_", "")).with_suffix("").parts)
    return max(len(parts & set(Path(file).with_suffix("").parts)) for file in patch.lines)


@contextmanager
def worktree() -> Iterator[Path]:
    """A checkout of HEAD that patches may change."""
    with tempfile.TemporaryDirectory(prefix="memfit-net-") as folder:
        path = Path(folder) / "checkout"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(path)], check=True, cwd=ROOT)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], check=True, cwd=ROOT)


def first_failure(checkout: Path, tests: list[str], seconds: float) -> tuple[str, bool]:
    """The first of `tests` to fail, empty if none does; and whether all of them or one that failed came in time."""
    if not tests:
        return "", True
    names = checkout / ".memfit-net-tests"
    names.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "MEMFIT_NET": "", "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(
        [*command, "-o", "addopts=-rfE", f"@{names}"],
        cwd=checkout,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = program.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, 9)
        program.communicate()
        return "", False
    if program.returncode == 0:
        return "", True
    found = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pytest ended with {program.returncode}:\n{output[-2000:]}")
    return found[1], True


class Suites:
    """Names of the tests in a checkout, each case and each function.

    Attributes:
        all: All of them.
        nightly: Those of `make nightly`, and functions all of whose cases it has.
    """

    def __init__(self, checkout: Path) -> None:
        nightly, others = (set(_collected(checkout, which)) for which in ("nightly", "not nightly"))
        functions = [{test.partition("[")[0] for test in tests} for tests in (nightly, others)]
        self.all = nightly | others | functions[0] | functions[1]
        self.nightly = nightly | (functions[0] - functions[1])


def examine(patch: Patch, record: Record, suites: Suites, checkout: Path) -> dict[str, Any]:
    """Ask the tests of `make test`, then the nightly ones, about one patch."""
    tests = [test for test in record.near(patch) if test in suites.all]
    names = {
        "make test": [test for test in tests if test not in suites.nightly],
        "make nightly": [test for test in tests if test in suites.nightly],
    }
    row: dict[str, Any] = {"entry": patch.entry, "files": sorted(patch.lines)}
    subprocess.run(["git", "apply", str(patch.path)], check=True, cwd=checkout)
    try:
        for suite, of_suite in names.items():
            failed, in_time = first_failure(checkout, of_suite, SECONDS)
            row[suite] = {"tests": len(of_suite), "noticed": failed, "decided": in_time}
            if failed:
                break
    finally:
        subprocess.run(["git", "checkout", "--quiet", "--", "."], check=True, cwd=checkout)
    return row


def _collected(checkout: Path, which: str) -> Iterator[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", which, "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "MEMFIT_NET": ""}
    output = subprocess.run(command, cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE).stdout
    return (line for line in output.splitlines() if "::" in line)


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The page of `rows`."""
    lines = [
        "# Which test notices what was mended once\n",
        f"{len(rows)} faults that CHANGELOGs listed as mended were brought back one by one, by the patches of",
        "`tests/net`. The tests that execute their lines were run, nearest first, until one failed. The suite of 8,800",
        "tests that there was at 26e3ebc2 noticed all of them; the patches say by which test.\n",
    ]
    for words, suites in (("`make test`", ("make test",)), ("With `make nightly`", ("make test", "make nightly"))):
        found = [name for name, row in rows.items() if any(_noticed(row, suite) for suite in suites)]
        lines.append(f"- {words}: {len(found)} of {len(rows)} ({len(found) / max(len(rows), 1):.0%}).")
    return "\n".join([*lines, "", *_table(rows), ""])


def _noticed(row: dict[str, Any], suite: str) -> str:
    return row.get(suite, {}).get("noticed", "")


def _table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| | what was mended | noticed by | test |"
    yield "|---|---|---|---|"
    for name, row in sorted(rows.items()):
        suite = next((suite for suite in ("make test", "make nightly") if _noticed(row, suite)), "")
        test = _noticed(row, suite)
        layer = test.split("/")[1] if test else ("nothing" if _is_decided(row) else "undecided")
        words = f"{layer}, nightly" if suite == "make nightly" and layer != "nightly" else layer
        yield f"| {name[:2]} | {row['entry']} | {words} | {_name(test)} |"


def _is_decided(row: dict[str, Any]) -> bool:
    return all(row.get(suite, {"decided": True})["decided"] for suite in ("make test", "make nightly"))


def _name(test: str) -> str:
    file, _, function = test.partition("::")
    return f"`{Path(file).stem}::{function.partition('[')[0]}`" if function else test


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.net", description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, help="folder that `tests.net.record` wrote into")
    parser.add_argument("--only", nargs="+", default=[], metavar="NN", help="numbers of patches")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args(argv)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.page:
        if options.record is None:
            parser.error("--record FOLDER is needed: what `tests.net.record` wrote")
        record = Record(options.record)
        patches = [read(path) for path in sorted(FOLDER.glob("*.patch"))]
        with worktree() as checkout:
            suites = Suites(checkout)
            for patch in patches:
                if not options.only or patch.name[:2] in options.only:
                    row = examine(patch, record, suites, checkout)
                    rows[patch.name] = row
                    print(patch.name, {key: value for key, value in row.items() if isinstance(value, dict)}, flush=True)
                    RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
