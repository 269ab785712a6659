"""What a measured run of Lightning is watched with: its prediction, step times, losses and resident memory."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memfit.bench.ddp_buckets import copies_gradients, holds_whole_model
from lightning_memfit.bench.record import Prediction
from lightning_memfit.bench.resident import ResidentGrowth
from lightning_memfit.bench.step_clock import StepClock
from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.fitting.prediction import profile_fit, runtime_of
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.first_batch import first_batch


class PredictRun(Callback):
    """Predict the peak before the run, for the record and for every `MemoryMonitor`.

    With DDP the first process predicts for all; one copy of the gradients is added, which DDP keeps in its buckets.

    Attributes:
        prediction: The prediction, or None.
        reason: Why there is none.
    """

    def __init__(self) -> None:
        self.prediction: Prediction | None = None
        self.reason = ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Predict on the fake clone of the module."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        if not holds_whole_model(trainer.strategy):
            name = type(trainer.strategy).__name__
            self.reason = f"`trainer.strategy={name}` divides the model; predictions are for one that is whole."
            return
        started = time.perf_counter()
        try:
            profile = profile_fit(trainer, pl_module, first_batch(trainer))
        except (TraceError, ValueError) as error:
            self.reason = str(error)
            return
        estimate = estimate_step(profile, runtime=runtime_of(trainer))
        buckets = sum(p.numel * p.itemsize for p in profile.parameters if p.trainable and not p.shared_with)
        buckets = buckets if copies_gradients(trainer.strategy) else 0
        breakdown = estimate.breakdown + MemoryBreakdown.device({Category.COMMUNICATION: buckets})
        self.prediction = Prediction(
            allocated_bytes=estimate.allocated_bytes + buckets,
            reserved_bytes=estimate.reserved_bytes + buckets,
            total_bytes=estimate.total_bytes + buckets,
            by_category={str(category): size for category, size in breakdown.by_category().items()},
            phase=estimate.phase,
            model_flops_per_step=sum(profile.flops.values()) * trainer.accumulate_grad_batches,
            seconds=time.perf_counter() - started,
        )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MemoryMonitor):
                callback.predicted = breakdown


class StepTimes(Callback):
    """Run a `StepClock` over Lightning's optimizer steps.

    Args:
        warmup_steps: Optimizer steps before the clock starts.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.clock = StepClock(warmup_steps)
        self._global_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the clock."""
        self._global_step = trainer.global_step
        self.clock.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count what lay between two batches as waiting."""
        self.clock.batch_starts()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a micro-batch; finish the step it ends. Lightning divides a loss by the number of micro-batches."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        self.clock.batch_ends(batch, loss if isinstance(loss, torch.Tensor) else None)
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self.clock.step_ends(trainer.strategy.root_device)


class HostGrowth(Callback):
    """Follow what the run adds to resident memory, from before the module is built. Put it after `PredictRun`."""

    def __init__(self) -> None:
        self.resident = ResidentGrowth()
        self.growth_bytes: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start from here."""
        self.resident.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look, before anything else is done."""
        self.growth_bytes = self.resident.growth_bytes
