"""Run all that needs a CUDA device, the most important answers first: `make gpu`.

    python -m benchmarks.gpu.suite [--minutes 25] [--folder benchmarks/results/gpu] [--only NAME] [--again]

Every step is a command of its own with a time limit. What it printed stands in `FOLDER/NAME.log`, how it ended in
`FOLDER/suite.json`. A step that passed is not run again, so that an interrupted suite goes on where it stopped; steps
that keep their own results on disk (the estimator's) go on in the middle. The exit code is 0 if all steps passed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results" / "gpu"


@dataclass(frozen=True)
class Step:
    """One command of the suite."""

    name: str
    command: tuple[str, ...]
    """Arguments of the Python interpreter."""
    limit_s: float
    """Seconds after which it is stopped; it may go on in the next run."""


STEPS = (
    Step("tests", ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--timeout", "240"), 360),
    Step("attention", ("-m", "benchmarks.estimator.attention"), 120),
    Step("estimator", ("-m", "benchmarks.estimator.run", "--device", "cuda"), 600),
    Step("optimizer_step", ("-m", "benchmarks.optimizer_step.run", "--device", "cuda"), 240),
    Step("estimator_table", ("-m", "benchmarks.estimator.table"), 60),
)


def run_step(step: Step, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one step and say how it ended; its whole process group is stopped at the limit."""
    started = time.monotonic()
    log = folder / f"{step.name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *step.command], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "out of time"
    return {
        "name": step.name,
        "command": " ".join(["python", *step.command]),
        "status": status,
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - started, 1),
        "last_lines": log.read_text(errors="replace").splitlines()[-15:],
    }


def run_suite(steps: Sequence[Step], folder: Path, minutes: float, again: bool = False) -> list[dict[str, Any]]:
    """Run what has not passed yet, as long as there is time; the record is written after every step."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "suite.json"
    known = {row["name"]: row for row in json.loads(record.read_text())} if record.exists() else {}
    ends = time.monotonic() + 60 * minutes
    for step in steps:
        if known.get(step.name, {}).get("status") == "passed" and not again:
            continue
        left = ends - time.monotonic()
        if left <= 0:
            print(f"{step.name}: no time left; run the suite again to go on.")
            continue
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        row = run_step(step, folder, min(step.limit_s, left))
        known[step.name] = row
        record.write_text(json.dumps(list(known.values()), indent=2) + "\n")
        print(
            f"{step.name}: {row['status']} in {row['seconds']:.0f} s", *row["last_lines"][-3:], sep="\n    ", flush=True
        )
    return [known.get(step.name, {"name": step.name, "status": "not run"}) for step in steps]


def main(argv: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="time for all steps together (default: 25)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where logs and suite.json go")
    parser.add_argument("--only", choices=[step.name for step in steps], help="run this step alone")
    parser.add_argument("--again", action="store_true", help="run steps that passed already, too")
    arguments = parser.parse_args(argv)
    chosen = [step for step in steps if arguments.only in (None, step.name)]
    rows = run_suite(chosen, arguments.folder, arguments.minutes, arguments.again)
    return 0 if all(row["status"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
