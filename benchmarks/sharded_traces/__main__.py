"""Predict and measure every run; write the results and the page."""

import argparse
from itertools import groupby
from typing import Any

from benchmarks.micro_batching.record import write
from benchmarks.sharded_traces.cases import CASES
from benchmarks.sharded_traces.measure import measured
from benchmarks.sharded_traces.predict import predict
from benchmarks.sharded_traces.table import PAGE, RESULT, apart, page


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded_traces", description=__doc__)
    parser.add_argument("words", nargs="*", help="Run cases whose names have all of these. Nothing is written then.")
    parser.add_argument("--seconds", type=float, default=60.0, help="Time limit of a run.")
    words = (arguments := parser.parse_args()).words
    cases = [case for case in CASES if all(word in case.name for word in words)]
    rows: list[dict[str, Any]] = []
    for _, group in groupby(sorted(cases, key=lambda case: case.world_size), key=lambda case: case.world_size):
        together = list(group)
        true = measured(together, 60.0 + arguments.seconds * len(together))
        for case in together:
            row = {"name": case.name, **true.get(case.name, {"failed": "the run failed"}), **predict(case)}
            rows.append(row)
            share = apart(row)
            print(f"{case.name:60s}", row if share is None else f"{share:+.3%} {row}", flush=True)
    if not words:
        write(RESULT, {"rows": rows})
        PAGE.write_text(page())
        print(f"wrote {RESULT.name} and {PAGE.name}")


if __name__ == "__main__":
    main()
