"""How large the package is, beside the ceilings of tests/budget.json.

A number may only fall. Whoever makes it smaller lowers its ceiling (`--write`); raising one by hand is a commit of its
own that says why. `tests/truth/test_budget.py` fails when a number is above its ceiling.

`python -m tests.budget` prints a table, `--json` the numbers alone.
"""

import argparse
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning_memfit
from tests.loads import WAYS
from tests.upstream_names import used_names

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "budget.json"
SLACK = 0.03
"""A ceiling that is higher than its number by more than this share is worth lowering."""

Numbers = dict[str, Any]
"""Numbers by name, as nested mappings."""

_NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Python 3.12 and later take f-strings apart, which is not to change the count.
_F_STRING_START, _F_STRING_END = (getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))


def measure() -> Numbers:
    """All numbers. Takes about 20 seconds, most of them for the fits of tests/loads.py."""
    package = ROOT / "lightning_memfit"
    folders = {path.name: list(path.rglob("*.py")) for path in package.iterdir() if path.is_dir()}
    folders["root files"] = [*package.glob("*.py"), *package.glob("*.pyi")]
    folders["cli"] = list((ROOT / "cli").rglob("*.py"))
    own = {name: count_lines(files) for name, files in sorted(folders.items()) if files}
    around = {name: list((ROOT / name).rglob("*.py")) for name in ("tests", "benchmarks", "examples")}
    return {
        "lines": {
            "package and cli": sum(own.values()),
            **own,
            **{name: count_lines(files) for name, files in around.items() if files},
        },
        "tokens": sum(count_tokens(path.read_text()) for files in folders.values() for path in files),
        "private_names": len(used_names()),
        "public_names": len([name for name in lightning_memfit.__all__ if not name.startswith("__")]),
        "loads": measure_loads(),
    }


def count_lines(files: Iterable[Path]) -> int:
    """Physical lines, with blank ones, comments and docstrings."""
    return sum(len(path.read_text().splitlines()) for path in files)


def count_tokens(source: str) -> int:
    """Python's tokens without comments, ends of lines and indentation. A string, and so a docstring, is one."""
    count, inside = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == _F_STRING_START:
            count += not inside
            inside += 1
        elif token.type == _F_STRING_END:
            inside -= 1
        elif not inside and token.type not in _NOT_COUNTED:
            count += 1
    return count


def measure_loads() -> dict[str, int]:
    """Lines that one import loads, measured in a process that has imported nothing of the package.

    Raises:
        RuntimeError: If a fit failed.
    """
    run = subprocess.run([sys.executable, "-m", "tests.loads"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"`python -m tests.loads` failed:\n{run.stderr}")
    loads: dict[str, int] = json.loads(run.stdout)
    return loads


def flatten(numbers: Numbers, before: str = "") -> dict[str, int]:
    """`{"lines": {"cli": 5}}` as `{"lines: cli": 5}`."""
    flat: dict[str, int] = {}
    for name, value in numbers.items():
        flat |= flatten(value, f"{before}{name}: ") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat


def above(numbers: Numbers, ceilings: Numbers) -> list[str]:
    """What breaks the budget, in words: numbers above their ceilings, and numbers without one."""
    allowed = flatten(ceilings)
    found = []
    for name, number in flatten(numbers).items():
        if name not in allowed:
            found.append(f"{name} is {number} and has no ceiling: add one to tests/budget.json")
        elif number > allowed[name]:
            found.append(f"{name} is {number}, {number - allowed[name]} above its ceiling of {allowed[name]}")
    return found


def below(numbers: Numbers, ceilings: Numbers) -> list[str]:
    """Ceilings that can be lowered, in words, and those of what is gone."""
    measured = flatten(numbers)
    found = []
    for name, ceiling in flatten(ceilings).items():
        if name not in measured:
            found.append(f"{name} is gone: remove its ceiling")
        elif measured[name] < ceiling * (1 - SLACK):
            found.append(f"{name}: lower the ceiling of {ceiling} to {measured[name]}")
    return found


def lowered(numbers: Numbers, ceilings: Numbers) -> Numbers:
    """Ceilings that are as low as the numbers, never higher than before. Those of what is gone are left out."""
    result: Numbers = {}
    for name, ceiling in ceilings.items():
        if name in numbers:
            number = numbers[name]
            result[name] = lowered(number, ceiling) if isinstance(ceiling, dict) else min(number, ceiling)
    return result


def read_table() -> tuple[Numbers, Numbers]:
    """Ceilings and targets."""
    table = json.loads(TABLE.read_text())
    return table["ceilings"], table["targets"]


def _print_table(numbers: Numbers, ceilings: Numbers, targets: Numbers) -> None:
    allowed, aims = flatten(ceilings), flatten(targets)
    print(f"{'':32}{'now':>9}{'ceiling':>9}{'target':>9}")
    for name, number in flatten(numbers).items():
        print(f"{name:32}{number:>9}{allowed.get(name, '-'):>9}{aims.get(name, '-'):>9}")


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(prog="python -m tests.budget", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, and how each load was counted")
    parser.add_argument("--write", action="store_true", help="lower the ceilings of tests/budget.json; raises none")
    options = parser.parse_args()
    numbers = measure()
    ceilings, targets = read_table()
    if options.write:
        ceilings = lowered(numbers, ceilings)
        TABLE.write_text(json.dumps({"ceilings": ceilings, "targets": targets}, indent=2) + "\n")
    if options.json:
        print(json.dumps({**numbers, "loads_counted_after": WAYS}, indent=2))
    else:
        _print_table(numbers, ceilings, targets)
        print(*above(numbers, ceilings), *below(numbers, ceilings), sep="\n")


if __name__ == "__main__":
    main()
