"""Run what needs a CUDA device, the most important answers first: `make gpu`.

    python -m benchmarks.gpu.suite [--minutes 14] [--more] [--folder benchmarks/results/gpu] [--only NAME] [--again]

`FIRST` is what later work waits for, and fits into the 15 minutes for which a device may be lent: whether a fork of a
process that is about to train can trace, and speed beside torch by hand, HF Trainer and plain Lightning: BERT-large,
GPT-2 medium, and GPT-2 XL in as little memory as each tool needs. `ANSWERS` follow and take 20 minutes at most, in
this order: are predictions right, do the tests of CUDA pass, does GPT-2 XL train on 12 GiB by a plan, and offloaded,
is step time right, does the fitter find more than `BatchSizeFinder`, the table of BERT-large. Steps that time something
have the device to themselves; others that follow each other begin together.

`--more` goes on with `MORE`. Every step is a command of its own with a time limit; what it printed is in
`FOLDER/NAME.log`, how it ended in `FOLDER/suite.json`. A step that passed is not run again, so that an interrupted
suite goes on where it stopped; steps that keep their own results on disk go on in the middle. Pages are written at the
end, whatever happened. The exit code is 0 if all steps passed.

`--device cpu` runs the same programs at a small scale, as the tests do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.runner import Job, rows_of

FOLDER = Path(__file__).parents[1] / "results" / "gpu"


@dataclass(frozen=True)
class Step:
    """One command of the suite."""

    name: str
    command: tuple[str, ...]
    """Arguments of the Python interpreter; `{folder}` stands for the folder of the results."""
    limit_s: float
    """Seconds after which it is stopped; it may go on in the next run."""
    small: tuple[str, ...] = ()
    """The same at a small scale on the CPU; empty where there is no such thing."""
    writes: str = ""
    """A file that the command refuses to overwrite, removed before it is run again."""
    timed: bool = True
    """Whether it times something, so that nothing else may run beside it."""

    def arguments(self, folder: Path) -> list[str]:
        """The command with the folder in its place."""
        return [part.replace("{folder}", str(folder)) for part in self.command]

    def is_done(self, row: dict[str, Any], folder: Path) -> bool:
        """Whether it passed, and what it wrote for others is still there."""
        is_there = not self.writes or Path(self.writes.replace("{folder}", str(folder))).exists()
        return row.get("status") == "passed" and is_there

    def on_cpu(self) -> Step:
        """The step with its small command."""
        return replace(self, command=self.small, small=())


def _bench(name: str, *more: str, device: str = "cuda") -> tuple[str, ...]:
    scale, folder = ("full", "benchmarks/results") if device == "cuda" else ("small", "{folder}")
    options = ("--experiment", name, "--device", device, "--scale", scale, "--folder", folder)
    return ("-m", "cli", "bench", *options, *more)


def _run(name: str, output: str, *more: str, device: str = "cuda") -> tuple[str, ...]:
    at_once = ("--processes", "6") if device == "cuda" else ()
    return ("-m", "benchmarks", name, "--device", device, "--output", f"{{folder}}/{output}", *more, *at_once)


def _configs(*files: str) -> tuple[str, ...]:
    return tuple(part for file in files for part in ("--config", file))


def _fit(name: str, *arguments: str) -> tuple[str, ...]:
    """Train; what the run writes goes into a folder of its own, as the next refuses to write over it."""
    return ("-m", "cli", "fit", *arguments, f"--trainer.default_root_dir={{folder}}/{name}")


_HERE = "benchmarks/gpu"
_GPT2XL = _configs("recipes/gpt2xl.yaml", f"{_HERE}/random_gpt2xl.yaml")
_TINY = (*_GPT2XL, *_configs(f"{_HERE}/tiny.yaml"))
_OFFLOADED = _configs("recipes/gpt2xl_zero3_offload.yaml", f"{_HERE}/random_gpt2xl.yaml", f"{_HERE}/zero_offload.yaml")
_BUILD = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
FIRST = (
    Step(
        "fork",
        ("-m", "benchmarks.gpu.fork", "--output", "{folder}/fork.json"),
        60,
        ("-m", "benchmarks.gpu.fork", "--device", "cpu", "--output", "{folder}/fork.json"),
    ),
    Step("peers_speed", _bench("peers_speed", "--fork"), 540, _bench("peers_speed", "--fork", device="cpu")),
)
"""What later work waits for."""

ANSWERS = (
    Step(
        "predictions",
        (
            *("-m", "benchmarks", "estimator", "--continue", "--device", "cuda"),
            *("--until", "150", "--seconds", "60", "--processes", "6"),
        ),
        215,
        _run("estimator", "e.json", "mlp b64 32-true adamw", device="cpu"),
        timed=False,
    ),
    Step(
        "tests",
        ("-m", "pytest", "-m", "gpu", "-n", "3", "-p", "no:cacheprovider", "--timeout", "240", "tests"),
        300,
        timed=False,
    ),
    Step(
        "plan_12gib",
        ("-m", "cli", "plan", *_GPT2XL, "--device", "12GiB", "--out", "{folder}/plan_12gib.yaml"),
        90,
        ("-m", "cli", "plan", *_TINY, "--device", "900MiB", "--out", "{folder}/plan_12gib.yaml"),
        writes="{folder}/plan_12gib.yaml",
        timed=False,
    ),
    Step("doctor", ("-m", "cli", "doctor"), 60, ("-m", "cli", "doctor"), timed=False),
    Step("cpu_adam", ("-c", _BUILD), 180, timed=False),
    Step(
        "fit_12gib",
        _fit("fit_12gib", *_GPT2XL, *_configs("{folder}/plan_12gib.yaml", f"{_HERE}/limit_12gib.yaml")),
        90,
        _fit("fit_12gib", *_TINY, *_configs("{folder}/plan_12gib.yaml"), "--trainer.accelerator=cpu"),
        writes="{folder}/fit_12gib/config.yaml",
    ),
    Step("zero3_offload", _fit("zero3_offload", *_OFFLOADED), 120, writes="{folder}/zero3_offload/config.yaml"),
    Step(
        "step_time",
        _run("step_time", "step_time_cuda.json", "--learn"),
        180,
        _run("step_time", "step_time_cpu.json", "--small", device="cpu"),
    ),
    Step(
        "fitter",
        _run("finder", "fitter_cuda.json", "--seconds", "80"),
        135,
        _run("finder", "fitter_cpu.json", "--small", device="cpu"),
    ),
    Step(
        "bert_large",
        _bench("bert_large", "--fork"),
        250,
        _bench("bert_large", "--only", "vanilla", device="cpu"),
    ),
)
"""What is asked then; they take 20 minutes at most. Offloading at a small scale is tested by its own tests."""

HOST_STATES = ("--only=host_states_ours", "--only=host_states_deepspeed", "--only=host_states_torchao")
"""Rows of `peers` with float32 weights and states on the host."""

MORE = (
    Step("attention", ("-m", "benchmarks.estimator.attention"), 60),
    Step("gpt2xl", _bench("gpt2xl"), 420),
    Step("activation_budget", _bench("activation_budget"), 300),
    Step("optimizer_step", ("-m", "benchmarks", "optimizer_step", "--device", "cuda"), 240),
    Step("host_master", _bench("peers", *HOST_STATES), 240),
    Step(
        "plan",
        ("-m", "cli", "plan", *_GPT2XL, "--device", "24GiB", "--out", "{folder}/plan.yaml"),
        120,
        writes="{folder}/plan.yaml",
    ),
    Step(
        "plan_fit",
        _fit("plan_fit", *_GPT2XL, *_configs("{folder}/plan.yaml", f"{_HERE}/limit_24gib.yaml")),
        240,
        writes="{folder}/plan_fit/config.yaml",
    ),
    Step("zero_infinity", _run("gpt2xl_zero_infinity", "zero_infinity_cuda.json", "--drive", "{folder}"), 420),
    Step("gpt2xl_24gb", _bench("gpt2xl_24gb"), 300),
    Step("peers", _bench("peers"), 600),
)
STEPS = (*FIRST, *ANSWERS, *MORE)


def run_step(step: Step, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a step, whose whole process group is stopped at the limit, and say how it ended."""
    if step.writes:
        Path(step.writes.replace("{folder}", str(folder))).unlink(missing_ok=True)
    log, started, status = folder / f"{step.name}.log", time.monotonic(), "out of time"
    # Asking NVML whether there is a device leaves a process without CUDA context, which can still be forked.
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, *step.arguments(folder)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    try:
        status = "failed" if process.wait(limit_s) else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {
        "name": step.name,
        "command": " ".join(["python", *command[1:]]),
        "status": status,
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - started, 1),
        "last_lines": log.read_text(errors="replace").splitlines()[-15:],
    }


def run_together(steps: Sequence[Step], folder: Path, ends: float) -> Iterator[dict[str, Any]]:
    """Start steps at once and say of each how it ended, as it does; none may run when `time.monotonic()` is `ends`."""
    jobs = [Job(run_step, step, (folder, min(step.limit_s, ends - time.monotonic()))) for step in steps]
    return rows_of(jobs, float("inf"), len(jobs))


def run_suite(steps: Sequence[Step], folder: Path, minutes: float, again: bool = False) -> list[dict[str, Any]]:
    """Run what has not passed yet, as long as there is time; the record is written after every step."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "suite.json"
    known = {row["name"]: row for row in json.loads(record.read_text())} if record.exists() else {}
    ends = time.monotonic() + 60 * minutes
    todo = [step for step in steps if again or not step.is_done(known.get(step.name, {}), folder)]
    for group in _groups(todo):
        for step in group:
            left = time.monotonic() < ends
            what = " ".join(step.arguments(folder)) if left else "no time left; run the suite again to go on."
            print(f"{step.name}: {what}")
        sys.stdout.flush()
        for row in run_together(group, folder, ends) if time.monotonic() < ends else ():
            known[row["name"]] = row
            record.write_text(json.dumps(list(known.values()), indent=2) + "\n")
            last = row["last_lines"][-3:]
            print(f"{row['name']}: {row['status']} in {row['seconds']:.0f} s", *last, sep="\n    ", flush=True)
    return [known.get(step.name, {"name": step.name, "status": "not run"}) for step in steps]


def _groups(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps that begin together, in their order: one that is timed, or all that follow each other and are not."""
    for timed, group in groupby(steps, key=lambda step: step.timed):
        if timed:
            yield from ([step] for step in group)
        else:
            yield list(group)


def main(argv: Sequence[str] | None = None, steps: Sequence[Step] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=14.0, help="time for all steps together (default: 14)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where logs and suite.json go")
    parser.add_argument("--only", choices=[step.name for step in steps or STEPS], help="run this step alone")
    parser.add_argument("--more", action="store_true", help="go on with the rest after these")
    parser.add_argument("--again", action="store_true", help="run steps that passed already, too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small commands, no pages")
    parser.add_argument("--dry-run", action="store_true", help="list the steps with their limits, and run nothing")
    arguments = parser.parse_args(argv)
    named = steps or (STEPS if arguments.more or arguments.only else (*FIRST, *ANSWERS))
    chosen = [step for step in named if arguments.only in (None, step.name)]
    if arguments.device == "cpu":
        chosen = [step.on_cpu() for step in chosen if step.small]
    if arguments.dry_run:
        for step in chosen:
            print(f"{step.name:18s} at most {step.limit_s:4.0f} s  python {' '.join(step.arguments(arguments.folder))}")
        return 0
    rows = run_suite(chosen, arguments.folder, arguments.minutes, arguments.again)
    passed = all(row["status"] == "passed" for row in rows)
    if steps is None and arguments.device == "cuda":
        (row,) = run_together([PAGES], arguments.folder, time.monotonic() + PAGES.limit_s)
        passed &= row["status"] == "passed"
    return 0 if passed else 1


PAGES = Step("pages", ("-m", "benchmarks.pages", "--folder", "{folder}"), 120)
"""Merges all results into the pages of the docs."""


if __name__ == "__main__":
    sys.exit(main())
