"""Run all that needs a CUDA device, the most important answers first: `make gpu`.

    python -m benchmarks.gpu.suite [--minutes 25] [--folder benchmarks/results/gpu] [--only NAME] [--again] [--dry-run]

Every step is a command of its own with a time limit. What it printed stands in `FOLDER/NAME.log`, how it ended in
`FOLDER/suite.json`. A step that passed is not run again, so that an interrupted suite goes on where it stopped; steps
that keep their own results on disk (the estimator's, those of `memfit bench`) go on in the middle. The exit code is 0
if all steps passed.
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
    """Arguments of the Python interpreter; `{folder}` stands for the folder of the results."""
    limit_s: float
    """Seconds after which it is stopped; it may go on in the next run."""

    def arguments(self, folder: Path) -> list[str]:
        """The command with the folder in its place."""
        return [part.replace("{folder}", str(folder)) for part in self.command]


def _bench(name: str) -> tuple[str, ...]:
    options = ("--experiment", name, "--device", "cuda", "--scale", "full", "--folder", "benchmarks/results")
    return ("-m", "cli", "bench", *options)


def _configs(*files: str) -> tuple[str, ...]:
    return tuple(part for file in files for part in ("--config", file))


_HERE = "benchmarks/gpu"
_PLANNED = _configs("recipes/gpt2xl.yaml", f"{_HERE}/random_gpt2xl.yaml")
_OFFLOADED = _configs("recipes/gpt2xl_zero3_offload.yaml", f"{_HERE}/random_gpt2xl.yaml", f"{_HERE}/zero_offload.yaml")
_INFINITY = ("-m", "benchmarks.gpt2xl_zero_infinity.run", "--drive", "{folder}", "--trainer.accelerator=gpu")
STEPS = (
    Step("tests", ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--timeout", "240"), 360),
    Step("gpt2xl", _bench("gpt2xl"), 420),
    Step("bert_large", _bench("bert_large"), 420),
    Step("activation_budget", _bench("activation_budget"), 300),
    Step("optimizer_step", ("-m", "benchmarks.optimizer_step.run", "--device", "cuda"), 240),
    Step("host_master", ("-m", "benchmarks.host_master.run", "--device", "cuda"), 240),
    Step("attention", ("-m", "benchmarks.estimator.attention"), 120),
    Step("estimator", ("-m", "benchmarks.estimator.run", "--device", "cuda"), 600),
    Step("plan", ("-m", "cli", "plan", *_PLANNED, "--device", "24GiB", "--out", "{folder}/plan.yaml"), 300),
    Step(
        "plan_fit", ("-m", "cli", "fit", *_PLANNED, *_configs("{folder}/plan.yaml", f"{_HERE}/limit_24gib.yaml")), 240
    ),
    Step("zero3_offload", ("-m", "cli", "fit", *_OFFLOADED), 300),
    Step("zero_infinity", _INFINITY, 420),
    Step("gpt2xl_24gb", _bench("gpt2xl_24gb"), 300),
    Step("peers", _bench("peers"), 600),
    Step("bench_pages", ("-m", "benchmarks.bench_pages"), 60),
    Step("estimator_table", ("-m", "benchmarks.estimator.table"), 60),
)


def run_step(step: Step, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one step and say how it ended; its whole process group is stopped at the limit."""
    started = time.monotonic()
    log = folder / f"{step.name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *step.arguments(folder)], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "out of time"
    return {
        "name": step.name,
        "command": " ".join(["python", *step.arguments(folder)]),
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
        print(f"{step.name}: {' '.join(step.arguments(folder))}", flush=True)
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
    parser.add_argument("--dry-run", action="store_true", help="list the steps with their limits, and run nothing")
    arguments = parser.parse_args(argv)
    chosen = [step for step in steps if arguments.only in (None, step.name)]
    if arguments.dry_run:
        for step in chosen:
            print(f"{step.name:18s} at most {step.limit_s:4.0f} s  python {' '.join(step.arguments(arguments.folder))}")
        return 0
    rows = run_suite(chosen, arguments.folder, arguments.minutes, arguments.again)
    return 0 if all(row["status"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
