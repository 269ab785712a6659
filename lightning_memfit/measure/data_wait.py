"""`DataWaitMonitor`: the share of a run's time that is spent between batches, waiting for data."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class DataWaitMonitor(Callback):
    """Log the share of time between the end of a batch and the start of the next, `throughput/data_wait_fraction`.

    On CUDA this is the host's time: while the device finishes a batch, a wait of the same length stays hidden.
    Validation and the first batch of an epoch, for which loaders start their workers, are left out. A batch costs two
    readings of the clock. Each process measures its own figures; those of the first are logged.

    Attributes:
        fraction: Share over the whole run so far; None before the second batch.
    """

    def __init__(self) -> None:
        self._waited = self._elapsed = 0.0
        self._started = 0.0
        self._ended: float | None = None
        self._logged_step = 0

    @property
    def fraction(self) -> float | None:
        """Share of the time that was spent between batches."""
        return self._waited / self._elapsed if self._elapsed else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last run."""
        self._waited = self._elapsed = 0.0
        self._logged_step = trainer.global_step

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the start of the epoch."""
        self._ended = None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out validation."""
        self._ended = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the wait."""
        self._started = time.perf_counter()
        if self._ended is not None:
            self._waited += self._started - self._ended
            self._elapsed += self._started - self._ended

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; log every `log_every_n_steps` optimizer steps of the Trainer."""
        self._ended = time.perf_counter()
        self._elapsed += self._ended - self._started
        every = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        step = trainer.global_step
        if step != self._logged_step and step % every == 0 and not trainer.barebones and self.fraction is not None:
            self._logged_step = step
            pl_module.log("throughput/data_wait_fraction", self.fraction)
