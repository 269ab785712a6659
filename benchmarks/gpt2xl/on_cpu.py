"""GPT-2 XL's true architecture for two optimizer steps on a CPU, and the quickstart.

`gpt2xl_live_bytes` has the live bytes of full fine-tuning steps, predicted and measured, with and without gradients:
those of all tensors that operators make, followed by a `StorageLedger` during both steps. Those inside bitsandbytes'
CPU kernels are included (not so before commit 00b5eed). It needs 16 GiB of free memory and half an hour. `quickstart`
keeps the report that the README shows.
"""

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.runner import SMALL, Benchmark, Options, Row, Stage
from benchmarks.text import ROOT, table
from lightning_memfit.memory import GIB

RESULT = "gpt2xl_live_bytes.json"
HERE = "benchmarks/gpt2xl"
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
"""Have the C library give freed memory back, so that the resident set says something about live bytes."""
SMALL_MODEL = [f"--model.config.{name}={value}" for name, value in
               {"n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 300}.items()]  # fmt: skip
_PLACES = """
trainer:
  enable_progress_bar: false
  logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {folder}}}}}
  callbacks+:
    - class_path: lightning_memfit.measure.monitor.MemoryMonitor
      init_args: {{report_path: {folder}/report.json, tracked_steps: {steps}}}
"""


@dataclass(frozen=True)
class Case:
    """A run of `memfit fit`."""

    name: str
    configs: tuple[str, ...]
    bar_gib: float = 0.0
    """What live bytes are to stay below; 0 for the quickstart."""


@dataclass(frozen=True)
class Fitted:
    """What a run of `memfit fit` left."""

    command: str
    report: dict[str, Any]
    """From a file `report.json` in its folder."""
    steps: list[dict[str, float]]
    """Everything logged at each optimizer step."""
    peak_rss_bytes: int
    seconds: float


def fit(command: list[str], hidden: list[str], folder: Path, variables: dict[str, str]) -> Fitted:
    """Run `memfit fit` to the end in a process of its own.

    Args:
        command: Its arguments.
        hidden: Further ones that say where to write.
        folder: Where it writes.
        variables: Further variables of its environment.

    Raises:
        RuntimeError: If it fails.
    """
    command, started = ["python", "-m", "cli", "fit", *command], time.perf_counter()
    process = subprocess.Popen([sys.executable, *command[1:], *hidden], cwd=ROOT, env=os.environ | variables)
    _, status, usage = os.wait4(process.pid, 0)  # the kernel's own figure for the largest resident set
    code, peak_rss_bytes = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
    if code:
        raise RuntimeError(f"ended with {code}, largest resident set {peak_rss_bytes / GIB:.1f} GiB")
    [report] = folder.rglob("report.json")
    steps: dict[int, dict[str, float]] = {}
    for file in folder.rglob("metrics.csv"):
        with file.open(encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                values = {key: float(value) for key, value in row.items() if value}
                steps.setdefault(int(values["step"]), {}).update(values)
    seconds = round(time.perf_counter() - started, 1)
    logged = [steps[step] for step in sorted(steps)]
    return Fitted(" ".join(command), json.loads(report.read_text()), logged, peak_rss_bytes, seconds)


def measure(case: Case, options: Options, row: Row) -> Row:
    """Fit once."""
    is_small = getattr(options, "small", False)
    free = psutil.virtual_memory().available
    if case.bar_gib and not is_small and free < 16 * GIB:
        raise RuntimeError(f"{free / GIB:.1f} GiB are free, 16 are needed")
    folder = options.folder / case.name
    folder.mkdir()
    places = folder / "places.yaml"
    places.write_text(_PLACES.format(folder=folder, steps=2 if case.bar_gib else 1))
    configs = [part for config in case.configs for part in ("--config", config)]
    small = SMALL_MODEL if is_small else []
    run = fit([*configs, *small], ["--config", str(places)], folder, MALLOC if case.bar_gib else {})
    if not case.bar_gib:
        return {"runs": run.command, "report": run.report}
    predicted, measured = (run.report[key]["device"] for key in ("predicted", "measured"))
    return {
        "runs": run.command,
        "predicted_bytes": sum(predicted.values()),
        "measured_bytes": sum(measured.values()),
        "bar_bytes": round(case.bar_gib * GIB),
        "predicted": predicted,
        "measured": measured,
        "peak_rss_bytes": run.peak_rss_bytes,
        "seconds_total": run.seconds,
        "optimizer_steps": run.steps,
    }


_KEPT = ("recipes/gpt2xl.yaml", f"{HERE}/live_bytes.yaml")
_CASES = (Case("gradients released", (*_KEPT, f"{HERE}/release.yaml"), 7.0), Case("gradients kept", _KEPT, 9.5))
_QUICKSTART = (Case("quickstart", ("recipes/quickstart.yaml",)),)
BENCHMARKS = {
    "gpt2xl_live_bytes": Benchmark(RESULT, lambda options: _CASES, (Stage(measure),), seconds=7200, arguments=(SMALL,)),
    "quickstart": Benchmark("quickstart_cpu.json", lambda options: _QUICKSTART, (Stage(measure),), threads=None),
}


def text(document: dict[str, Any]) -> str:
    """One row per case: predicted and measured peaks of live bytes, and the largest resident set, in GiB."""
    keys = ("predicted_bytes", "measured_bytes", "peak_rss_bytes")
    lines = [[row["name"], *(f"{row[key] / GIB:.2f}" for key in keys)] for row in document["rows"]]
    return table(["", "predicted GiB", "measured GiB", "largest resident set"], lines, right=3)
