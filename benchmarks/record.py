"""Write a benchmark's figures with what they depend on, and read what a run of `memfit fit` left."""

import csv
import gc
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from lightning_memfit.bench import record
from lightning_memfit.memory import GIB
from lightning_memfit.techniques.core.precision import trainer_options

ROOT = Path(__file__).parents[1]
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
"""Options of a Trainer that leaves nothing behind and says nothing."""


def trainer_of(*callbacks: pl.Callback, max_steps: int = 2, device: str = "cpu", **options: Any) -> pl.Trainer:
    """A Trainer of one device that leaves nothing behind, with what the callbacks ask of its options."""
    precision = options.pop("precision", None)  # a Trainer takes it, or a plugin of it
    return pl.Trainer(
        accelerator="gpu" if device == "cuda" else device,
        devices=1,
        max_steps=max_steps,
        max_epochs=-1,  # an epoch may have two steps only
        **(QUIET | options | trainer_options(callbacks, precision)),
    )


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write one JSON file: figures, versions, hardware and commit."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    document = {
        "command": " ".join(["python -m", module.name if module else Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": record.versions(),
        "hardware": {
            **record.hardware(""),
            "cpu": _processor(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "threads": torch.get_num_threads(),
        "commit": record.commit(),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return models[0].partition(":")[2].strip() if models else platform.processor()


class Repeated:
    """A loader that gives one batch again and again, and makes nothing in memory."""

    def __init__(self, batch: Any, times: int) -> None:
        self.batch, self.times = batch, times

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * self.times)

    def __len__(self) -> int:
        return self.times


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of `write`; none where there is no file."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return rows


def write_aside(path: Path, figures: dict[str, Any]) -> None:
    """Write in a process of its own: asking a device for its name leaves a context, which can't be forked."""
    process = multiprocessing.get_context("fork").Process(target=write, args=(path, figures))
    process.start()
    process.join()


# --- ranks on the CPU -------------------------------------------------------------------------------------------------


def answer_of(module: str, *arguments: Any, **environment: str) -> Any:
    """Run `python -m MODULE ARGUMENTS FILE` on the CPU, and return what it wrote into FILE as JSON.

    Args:
        module: A module of a benchmark.
        arguments: What it is told.
        environment: Further variables.
    """
    variables = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | environment
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, *map(str, arguments), str(answer)]
        subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.DEVNULL)
        return json.loads(answer.read_text(encoding="utf-8"))


def host_tensors() -> Iterator[torch.Tensor]:
    """Tensors of this process on the CPU that Python can reach; parts of distributed ones, not these themselves."""
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu":
            yield found


def host_tensor_bytes() -> int:
    """Bytes of their storages, each once."""
    storages = (tensor.untyped_storage() for tensor in host_tensors())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# --- long runs on a CPU -----------------------------------------------------------------------------------------------


MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
"""Have the C library give freed memory back, so that the resident set says something about live bytes."""


@dataclass(frozen=True)
class Fitted:
    """What a run of `memfit fit` left."""

    command: str
    report: dict[str, Any]
    """From the file `report.json` of its folder."""
    steps: list[dict[str, float]]
    """Everything logged at each optimizer step."""
    peak_rss_bytes: int
    seconds: float


def fit(configs: list[str], options: list[str], overlay: str, needed_gib: int) -> Fitted:
    """Run `memfit fit` to the end in a process of its own.

    Args:
        configs: Recipe and overlays.
        options: Of the command.
        overlay: A last one, as text, in which `{folder}` stands for a folder of this run. It tells logger and report.
        needed_gib: Free memory that it needs.
    """
    free = psutil.virtual_memory().available
    if free < needed_gib * GIB:
        raise SystemExit(f"{free / GIB:.1f} GiB are free, {needed_gib} are needed.")
    command = ["python", "-m", "cli", "fit", *(part for config in configs for part in ("--config", config)), *options]
    with tempfile.TemporaryDirectory() as folder:
        places = Path(folder) / "places.yaml"
        places.write_text(overlay.format(folder=folder), encoding="utf-8")
        started = time.perf_counter()
        code, peak_rss_bytes = run([sys.executable, *command[1:], "--config", str(places)], MALLOC)
        if code:
            size = f"{peak_rss_bytes / GIB:.1f} GiB"
            raise SystemExit(f"`{' '.join(command)}` ended with {code}, largest resident set {size}.")
        seconds = time.perf_counter() - started
        report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
        return Fitted(" ".join(command), report, read_metrics(Path(folder)), peak_rss_bytes, round(seconds, 1))


def run(command: list[str], variables: dict[str, str] | None = None) -> tuple[int, int]:
    """Run to the end; return exit code and the kernel's own figure for the largest resident set, in bytes."""
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | (variables or {}))
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
