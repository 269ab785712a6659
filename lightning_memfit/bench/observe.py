"""What a measured run is watched with: its prediction, its step times and its loss."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memfit.bench.ddp_buckets import copies_gradients, holds_whole_model
from lightning_memfit.bench.record import Prediction, Speed
from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.fitting.prediction import profile_fit, runtime_of
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.measure.throughput import count_samples, count_tokens
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


@dataclass
class _Step:
    seconds: float = 0.0
    waited: float = 0.0
    samples: int | None = 0
    tokens: int | None = 0


class StepTimes(Callback):
    """Time every optimizer step after a warm-up, and keep the first and the last loss.

    On CUDA the device is waited for at the end of every optimizer step, so that a time is that of its own step.

    Args:
        warmup_steps: Optimizer steps before the clock starts.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.steps: list[_Step] = []
        self._current = _Step()
        self._num_steps = 0
        self._global_step = 0
        self._last = 0.0
        self._step_start = 0.0
        self._losses: list[torch.Tensor] = []
        self._first: list[torch.Tensor] = []
        self._final: list[torch.Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the clock."""
        self._global_step = trainer.global_step
        self._last = time.perf_counter()
        self._step_start = self._last

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count what lay between two batches as waiting."""
        self._current.waited += time.perf_counter() - self._last

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a micro-batch; finish the step it ends."""
        step = self._current
        step.samples = _sum(step.samples, count_samples(batch))
        step.tokens = _sum(step.tokens, count_tokens(batch))
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), torch.Tensor):
            self._losses.append(outputs["loss"].detach())
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._finish(trainer)
        self._last = time.perf_counter()

    def _finish(self, trainer: Trainer) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        self._current.seconds = now - self._step_start
        self._num_steps += 1
        if self._num_steps > self.warmup_steps:
            self.steps.append(self._current)
        self._step_start = now
        self._current = _Step()
        self._first = self._first or self._losses
        self._final, self._losses = self._losses, []

    @property
    def losses(self) -> tuple[float | None, float | None]:
        """Loss of the first and of the last optimizer step: Lightning divides that of a micro-batch by their number."""
        return _total(self._first), _total(self._final)

    def speed(self, num_processes: int = 1) -> Speed | None:
        """Median and quantiles; None before the first timed step."""
        if not self.steps:
            return None
        seconds = torch.tensor([step.seconds for step in self.steps], dtype=torch.float64)
        low, median, high = (float(seconds.quantile(q)) for q in (0.05, 0.5, 0.95))
        samples, tokens = (_mean([getattr(step, name) for step in self.steps]) for name in ("samples", "tokens"))
        return Speed(
            timed_steps=len(self.steps),
            step_seconds_median=median,
            step_seconds_q05=low,
            step_seconds_q95=high,
            samples_per_second=None if samples is None else samples * num_processes / median,
            tokens_per_second=None if tokens is None else tokens * num_processes / median,
            data_wait_fraction=sum(step.waited for step in self.steps) / float(seconds.sum()),
        )


def _total(losses: list[torch.Tensor]) -> float | None:
    return float(torch.stack([loss.float() for loss in losses]).sum()) if losses else None


def _sum(total: int | None, count: int | None) -> int | None:
    return None if total is None or count is None else total + count


def _mean(counts: list[int | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return sum(known) / len(known) if len(known) == len(counts) and any(known) else None
