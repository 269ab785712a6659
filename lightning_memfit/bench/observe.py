"""Callbacks that observe a measured run of Lightning: its prediction, step times, losses and resident memory.

The functions before them say what DDP adds: its reducer keeps gradients a second time, in buckets that no ledger sees.
"""

import time
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_memfit.bench.record import Prediction
from lightning_memfit.bench.step_clock import ResidentGrowth, StepClock
from lightning_memfit.estimate.division import NotDividedError, estimate_rank
from lightning_memfit.fitting.size.prediction import division_in_run, profile_fit, runtime_of
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.memory import Category
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.first_batch import first_batch

# --- the buckets of `DistributedDataParallel` -------------------------------------------------------------------------

# The reducer allocates its buckets outside of any dispatch, so their size is read from DDP itself, by
# `DistributedDataParallel._get_ddp_logging_data` (torch 2.11 to 2.13), the only place that knows it;
# `tests/rules/bench/test_observe.py` fails when it moves.


def bucket_bytes(model: Any) -> int:
    """Bytes of the gradient buckets of a wrapped module; 0 if its gradients are views of the buckets."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return sum(int(size) for size in str(sizes).split(",") if size.strip())


def with_buckets(by_category: Mapping[Category, int], size_bytes: int, followed_steps: int) -> dict[Category, int]:
    """Return bytes by category with DDP's buckets counted as communication.

    DDP allocates its buckets when it wraps the module, which no ledger sees, and again in the forward of the second
    step, where a ledger takes them for activations.
    """
    result = dict(by_category)
    if not size_bytes:
        return result
    result[Category.COMMUNICATION] = size_bytes
    if followed_steps > 1:
        result[Category.ACTIVATION] = result.get(Category.ACTIVATION, 0) - size_bytes
    return result


# --- callbacks --------------------------------------------------------------------------------------------------------


class PredictRun(Callback):
    """Predict the peak before the run, for the record and for every `MemoryMonitor`.

    The first process predicts for all of them: what a rank keeps under DDP or DeepSpeed (`estimate.division`).

    Attributes:
        prediction: The prediction, or None if there is none.
        reason: Why there is no prediction.
    """

    def __init__(self) -> None:
        self.prediction: Prediction | None = None
        self.reason = ""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Predict with a fake clone of the module."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        started, name = time.perf_counter(), type(trainer.strategy).__name__
        precision = str(trainer.precision)
        try:
            division = division_in_run(trainer)
            traced = division.traced_precision(precision) if division is not None else precision
            batch = first_batch(trainer)
            # Lightning would make a process group around the module's `prepare_data`, and wait for the other ranks.
            with patch.object(torch.distributed, "is_initialized", return_value=False):
                profile = profile_fit(trainer, pl_module, batch, precision=traced)
            estimate = estimate_rank(profile, division, runtime=runtime_of(trainer))
        except NotDividedError as error:
            self.reason = f"`trainer.strategy={name}` divides the model, and {error}."
            return
        except (TraceError, ValueError) as error:
            self.reason = str(error)
            return
        breakdown = estimate.breakdown.tensors() if profile.device_kind.is_host else estimate.breakdown
        self.prediction = Prediction(
            allocated_bytes=estimate.allocated_bytes,
            reserved_bytes=estimate.reserved_bytes,
            total_bytes=estimate.total_bytes,
            by_category={str(category): size for category, size in breakdown.by_category().items()},
            phase=estimate.phase,
            model_flops_per_step=sum(profile.flops.values()) * trainer.accumulate_grad_batches,
            seconds=time.perf_counter() - started,
        )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MemoryMonitor):
                callback.predicted = breakdown


class RunObserver(Callback):
    """Time optimizer steps, and measure what the run adds to resident memory. List it after `PredictRun`.

    Args:
        warmup_steps: Optimizer steps before the clock starts.

    Attributes:
        clock: Times and losses of the steps.
        growth_bytes: What was added to resident memory from before the module is built; None before the run's end.
        bucket_bytes: What DDP keeps in its buckets, which exist during the run only.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.clock = StepClock(warmup_steps)
        self.growth_bytes: int | None = None
        self.bucket_bytes = 0
        self._resident = ResidentGrowth()
        self._global_step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start measuring resident memory."""
        self._resident.start()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._global_step = trainer.global_step
        self.clock.start()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the time between two batches as waiting."""
        self.clock.batch_starts()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a micro-batch, and finish the step if it ends one; Lightning has divided its loss by their number."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        self.clock.batch_ends(batch, loss if isinstance(loss, torch.Tensor) else None)
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self.clock.step_ends(trainer.strategy.root_device)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the growth before anything else allocates memory, and the buckets while they exist."""
        self.growth_bytes = self._resident.growth_bytes
        self.bucket_bytes = bucket_bytes(trainer.strategy.model)
