"""Wall-clock seconds of every optimizer step, warm-up included."""

import time
from typing import Any

import lightning.pytorch as pl


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
