"""What runs of GPT-2 XL log and write."""

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil

from lightning_memfit.estimate.deepspeed import deepspeed_memory
from lightning_memfit.memory.conversion import parameter_table


class StepTimes(pl.Callback):
    """Log `step_seconds`: from one optimizer step's end to the next one's, the first from the start of training."""

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


class Transfers(pl.Callback):
    """Log what forward and backward pass (`passes_*`) and the optimizer's step (`update_*`) read, write and take.

    Bytes are those that reach storage, O_DIRECT included, as the kernel counts them for this process. What the
    preflight predicts is written beside the metrics, in `report.json`. Needs `accumulate_grad_batches=1`.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what the preflight predicts, and start counting."""
        strategy: Any = trainer.strategy
        parameters = parameter_table(pl_module)
        described = strategy._described(parameters, strategy._sizes(parameters), accumulates=False)
        predicted = deepspeed_memory(described).around_passes.to_dict()
        assert trainer.log_dir is not None
        folder = Path(trainer.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps({"bytes_per_rank": predicted}), encoding="utf-8")
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
