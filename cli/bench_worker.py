"""One measured run: `python -m lightning_memfit.cli.bench_worker FOLDER`, started by `memfit bench` and `memfit scale`.

The folder holds `settings.yaml` (a configuration as for `memfit fit`) and `job.json`; the worker writes `outcome.json`
there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer

from lightning_memfit.bench.observe import PredictRun, RunObserver, with_buckets
from lightning_memfit.bench.record import Memory, UnsupportedError
from lightning_memfit.bench.tracking import Tracker, Tracking
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.measure.report import versions
from lightning_memfit.memory.kind import DeviceKind, hardware_name
from lightning_memfit.memory.oom import is_out_of_memory
from lightning_memfit.memory.process import peak_rss_bytes
from lightning_memfit.memory.replicas import num_replicas

from .lightning_cli import MemFitCLI

_NEVER = 1_000_000_000  # steps between two samples of the monitor, so that only the step is timed


class _Run:
    """A Trainer with everything that observes it."""

    def __init__(self, folder: Path) -> None:
        job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        warmup_steps = int(job["warmup_steps"])
        self.prediction = PredictRun()
        self.observer = RunObserver(warmup_steps)
        self.monitor = MemoryMonitor(tracked_steps=warmup_steps, every_n_steps=_NEVER)
        self.trainer: Trainer | None = None
        self.tracker: Tracker | None = None
        self._folder = folder
        self._job = job

    def fit(self) -> None:
        """Build everything with the command line's own classes, and train."""
        cli = MemFitCLI([f"--config={self._folder / 'settings.yaml'}"], run=False, save_config_callback=None)
        self.trainer = cli.trainer
        watching = (self.prediction, self.observer, self.monitor)
        cli.trainer.callbacks.extend(watching)  # type: ignore[attr-defined]
        self._track()
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)

    def _track(self) -> None:
        """Start a Weights & Biases run in the first process, if one is asked for."""
        if self._job.get("tracking") is None or _rank() > 0:
            return
        settings = yaml.safe_load((self._folder / "settings.yaml").read_text(encoding="utf-8"))
        config = {"point": self._job["point"], "settings": settings, "versions": versions()}
        self.tracker = Tracker(Tracking(**self._job["tracking"]), self._job["row"], config)

    def finish_tracking(self, outcome: dict[str, Any]) -> None:
        """Pass everything that was measured to the Weights & Biases run."""
        if self.tracker is None:
            return
        steps = [{"step_seconds": step.seconds, "data_wait_seconds": step.waited} for step in self.observer.clock.steps]
        predicted, measured = outcome["predicted"], outcome["measured"]["allocated_bytes"]
        error = predicted["allocated_bytes"] / measured - 1 if predicted and measured else None
        self.tracker.finish(steps, {**outcome, "prediction_error": error})

    def outcome(self) -> dict[str, Any]:
        """Return everything that was measured, as plain data."""
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        speed = self.observer.clock.speed(num_replicas(self.trainer) if self.trainer else 1)
        first, last = self.observer.clock.losses
        return {
            "no_prediction": self.prediction.reason,
            "predicted": self.prediction.prediction and vars(self.prediction.prediction),
            "measured": vars(self._memory(device)),
            "speed": speed and vars(speed),
            "loss_first": first,
            "loss_last": last,
            "hardware": {
                "device": hardware_name(device),
                "threads": torch.get_num_threads(),
            },
        }

    def _memory(self, device: torch.device) -> Memory:
        report = self.monitor.report
        tracked = report.measured.by_category() if report and report.measured else {}
        by_category = with_buckets(tracked, self.observer.bucket_bytes, self.monitor.tracked_steps)
        counted = DeviceKind.of(device).has_caching_allocator
        live = sum(by_category.values()) or None
        return Memory(
            allocated_bytes=torch.cuda.max_memory_allocated(device) if counted else live,
            reserved_bytes=torch.cuda.max_memory_reserved(device) if counted else None,
            by_category={str(category): size for category, size in by_category.items()},
            process_bytes=report.process_bytes if report else None,
            card_bytes=report.card_bytes if report else None,
            peak_rss_bytes=peak_rss_bytes(),
            rss_growth_bytes=self.observer.growth_bytes,
        )


def main(argv: list[str]) -> int:
    """Measure one run; an error is part of the outcome."""
    folder = Path(argv[0])
    peer = json.loads((folder / "job.json").read_text(encoding="utf-8")).get("peer")
    run = import_module("benchmarks.peers.run").PeerRun(folder) if peer else _Run(folder)
    status: dict[str, Any] = {"status": "ok"}
    try:
        run.fit()
    except BaseException as error:
        kind = _kind(error)
        name = "Unsupported" if kind == "unsupported" else type(error).__name__
        status = {"status": kind, "error": {"type": name, "message": " ".join(str(error).split())[:500]}}
        traceback.print_exc()
    outcome = {**status, **run.outcome()}
    if _rank() > 0 and status["status"] == "ok":
        return 0
    _write(folder, outcome)
    run.finish_tracking(outcome)
    # If another process ended successfully, the first one would wait for it forever.
    return int(status["status"] == "failed" or _rank() > 0)


def _kind(error: BaseException) -> str:
    if isinstance(error, UnsupportedError):
        return "unsupported"
    return "out_of_memory" if is_out_of_memory(error) else "failed"


def _rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _write(folder: Path, outcome: dict[str, Any]) -> None:
    name = f"outcome_{_rank()}.json" if _rank() else "outcome.json"
    partial = folder / f"{name}.partial"
    partial.write_text(json.dumps(outcome), encoding="utf-8")
    partial.replace(folder / name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
