"""Seconds and bytes of each half of a step, as the kernel counts them for this process."""

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil


class Transfers(pl.Callback):
    """Log what forward and backward pass (`passes_*`) and the optimizer's step (`update_*`) read, write and take.

    Bytes are those that reach storage, O_DIRECT included. What the preflight predicted is written beside the metrics,
    in `preflight.json`. Needs `accumulate_grad_batches=1`.
    """

    def __init__(self) -> None:
        self._last = (0.0, 0, 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the preflight's report, and start counting."""
        report: Any = trainer.strategy.report  # type: ignore[attr-defined]
        assert trainer.log_dir is not None
        folder = Path(trainer.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "preflight.json").write_text(json.dumps(report.to_dict()), encoding="utf-8")
        self._last = _now()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """The passes are done."""
        self._log("passes", pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """The step is done."""
        self._log("update", pl_module)

    def _log(self, part: str, module: pl.LightningModule) -> None:
        now = _now()
        for name, before, after in zip(("seconds", "read_bytes", "written_bytes"), self._last, now, strict=True):
            module.log(f"{part}_{name}", float(after - before))
        self._last = now


def _now() -> tuple[float, int, int]:
    counters = psutil.Process().io_counters()
    return time.perf_counter(), counters.read_bytes, counters.write_bytes
