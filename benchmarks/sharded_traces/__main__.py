"""Predict and measure every run; write the results."""

import argparse
import json
from itertools import groupby
from typing import Any

from benchmarks.record import write
from benchmarks.sharded_traces.cases import CASES
from benchmarks.sharded_traces.measure import measured
from benchmarks.sharded_traces.predict import predict
from benchmarks.sharded_traces.table import RESULT, apart


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by the order of cases, those that were not run now from the last record."""
    before = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    by_name = {row["name"]: row for row in (*before, *rows)}
    ordered = sorted(CASES, key=lambda case: case.world_size)
    return [by_name[case.name] for case in ordered if case.name in by_name]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded_traces", description=__doc__)
    parser.add_argument("words", nargs="*", help="Run cases whose names have all of these. Nothing is written then.")
    parser.add_argument("--predict", action="store_true", help="Keep the measured peaks of the record.")
    parser.add_argument("--keep", action="store_true", help="Write nevertheless, and keep the rows of all other cases.")
    parser.add_argument("--seconds", type=float, default=60.0, help="Time limit of a run.")
    words = (arguments := parser.parse_args()).words
    record = {row["name"]: row for row in json.loads(RESULT.read_text())["rows"]} if arguments.predict else {}
    cases = [case for case in CASES if all(word in case.name for word in words)]
    rows: list[dict[str, Any]] = []
    for _, group in groupby(sorted(cases, key=lambda case: case.world_size), key=lambda case: case.world_size):
        together = list(group)
        true = record or measured(together, 60.0 + arguments.seconds * len(together))
        for case in together:
            row = {"name": case.name, **true.get(case.name, {"failed": "the run failed"}), **predict(case)}
            rows.append(row)
            share = apart(row)
            print(f"{case.name:60s}", row if share is None else f"{share:+.3%} {row}", flush=True)
    if arguments.keep or not words:
        if arguments.predict:
            RESULT.write_text(json.dumps(json.loads(RESULT.read_text()) | {"rows": merged(rows)}, indent=2) + "\n")
        else:
            write(RESULT, {"rows": merged(rows)})
        print(f"wrote {RESULT.name}")


if __name__ == "__main__":
    main()
