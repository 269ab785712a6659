"""Predict and measure every module of the zoo, each in a process of its own; write the results."""

import argparse
from typing import Any

from benchmarks.memory_zoo.examine import in_empty_folder
from benchmarks.memory_zoo.table import RESULT
from benchmarks.processes import each
from benchmarks.record import write


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="Names of modules; all by default. With names nothing is written.")
    parser.add_argument("--processes", type=int, default=1, help="How many run at a time.")
    parser.add_argument("--seconds", type=float, default=120.0, help="Time limit of a module.")
    arguments = parser.parse_args()
    from benchmarks.memory_zoo.modules import ZOO

    rows: dict[str, dict[str, Any]] = {}
    for name, found in each(in_empty_folder, arguments.names or ZOO, arguments.seconds, arguments.processes):
        row = {"refused": str(found), "failed": True} if isinstance(found, Exception) else found
        rows[name] = row
        true, predicted = row.get("true_bytes"), row.get("predicted_bytes")
        apart = f"{(predicted - true) / true:+.3%}" if true and predicted else row.get("refused", "")[:300]
        print(f"{name:34s} {apart} {row.get('remarks') or ''} {row.get('changed') or ''}", flush=True)
    if not arguments.names:
        from benchmarks.memory_zoo.table import conditions

        found_rows = [{"name": name, **rows[name]} for name in ZOO if name in rows]
        write(RESULT, {"conditions": conditions(), "rows": found_rows})
        print(f"wrote {RESULT.name}")


if __name__ == "__main__":
    main()
