"""Write a benchmark's figures with what they depend on, and read what a run of `memfit fit` left."""

import csv
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from lightning_memfit.bench.record import versions

ROOT = Path(__file__).parents[1]
_PACKAGES = ("lightning-memfit", "torch", "lightning", "transformers", "bitsandbytes")


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write one JSON file: figures, versions, hardware and commit."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    record = {
        "command": " ".join(["python -m", module.name if module else Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": versions(),
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "threads": torch.get_num_threads(),
        "commit": commit(),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def write_aside(path: Path, figures: dict[str, Any]) -> None:
    """Write in a process of its own: asking a device for its name leaves a context, which can't be forked."""
    process = multiprocessing.get_context("fork").Process(target=write, args=(path, figures))
    process.start()
    process.join()


def commit() -> str:
    """The checkout's commit."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


# --- long runs on a CPU -----------------------------------------------------------------------------------------------


def provenance(packages: tuple[str, ...] = _PACKAGES) -> dict[str, Any]:
    """What figures of a CPU depend on: hardware, versions, commit."""
    return {
        "hardware": hardware(),
        "versions": {package: version(package) for package in packages} | {"python": platform.python_version()},
        "commit": commit(),
    }


def hardware() -> dict[str, str | int]:
    """This machine's processor and memory."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count() or 0,
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "memory_bytes": psutil.virtual_memory().total,
    }


def run(command: list[str]) -> tuple[int, int]:
    """Run to the end; return exit code and the kernel's own figure for the largest resident set, in bytes."""
    process = subprocess.Popen(command, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Everything logged at each optimizer step."""
    [file] = folder.rglob("metrics.csv")
    steps: dict[int, dict[str, float]] = {}
    with file.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            values = {key: float(value) for key, value in row.items() if value}
            steps.setdefault(int(values["step"]), {}).update(values)
    return [steps[step] for step in sorted(steps)]


class StepTimes(pl.Callback):
    """Log `step_seconds`: from one optimizer step's end to the next one's, the first from the start of training."""

    def __init__(self) -> None:
        self._last = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log after the micro-batch that stepped."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            now = time.perf_counter()
            pl_module.log("step_seconds", now - self._last)
            self._last = now
