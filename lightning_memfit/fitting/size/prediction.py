"""Predict a run's memory from inside its Trainer, before anything is allocated for it.

`SizePrediction` predicts the peak of any micro-batch size for `MicroBatching`; the callback `MemoryPrediction` predicts
that of the run as it is configured.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_memfit.device.runtime import RuntimeMemory, runtime_memory
from lightning_memfit.estimate.estimate import Estimate, estimate_step, predict_peak_bytes
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.memory import Category, MemoryBreakdown, format_bytes
from lightning_memfit.memory.attach import hide_idle_hooks
from lightning_memfit.memory.kind import CPU, CUDA, compute_capability
from lightning_memfit.profile.build import batch_size, profile_module, resize_batch
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.events import CATEGORIES
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, TraceError
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.first_batch import first_batch


def profile_fit(
    trainer: Trainer,
    module: LightningModule,
    batch: Any,
    any_micro_batch: bool = False,
    accumulate_grad_batches: int | None = None,
) -> ModelProfile:
    """Profile the training step that a Trainer is about to run.

    Call it in a callback's `setup`, when the model is not configured yet. Techniques that are already
    applied are removed during the trace, because a copy of a module with wrapped methods would call the original.

    Args:
        trainer: The Trainer that is about to fit.
        module: The Trainer's module, which is not changed.
        batch: A real batch of the size of interest.
        any_micro_batch: Profile a second size, so that every other can be computed from the two.
        accumulate_grad_batches: Micro-batches per step; by default those of the Trainer.

    Raises:
        TraceError: If the step can't be traced.
    """
    techniques = tuple(c for c in trainer.callbacks if isinstance(c, TechniqueCallback))  # type: ignore[attr-defined]
    options = StepOptions(
        trainer.precision,  # type: ignore[arg-type]
        accumulate_grad_batches or trainer.accumulate_grad_batches,
        trainer.gradient_clip_val,
        trainer.gradient_clip_algorithm,
    )
    with ExitStack() as stack:
        for technique in reversed(techniques):  # left, and applied again, in their own order
            stack.enter_context(technique.taken_off(trainer, module))
        return profile_module(
            module,
            batch,
            options,
            emulation_of(trainer),
            techniques,
            any_micro_batch=any_micro_batch,
            cache=ProfileCache(),
        )


@dataclass(frozen=True)
class SizePrediction:
    """The peak of a training step at any micro-batch size: a `PeakPredictor` made from the memory model.

    The search assumes that gradients are alive from start to end, as they are from the second micro-batch of a step on.
    The device's whole batch is on the device, whatever the micro-batch size.
    """

    profile: ModelProfile
    runtime: RuntimeMemory | None
    local_batch_size: int
    """Samples that the loader gives each device."""
    whole: ModelProfile | None = None
    """Profile of a step with the whole batch as one micro-batch, whose gradients are cleared before its backward."""

    def __call__(self, size: int) -> int:
        """Return the predicted peak in bytes."""
        return predict_peak_bytes(self.profile, size, self.runtime) + self._waiting_bytes(size)

    def tell_monitors(self, trainer: Trainer, size: int) -> None:
        """Pass the prediction for the size in use to every `MemoryMonitor` of the Trainer."""
        if size >= self.local_batch_size and self.whole is not None:
            _tell_monitors(trainer, estimate_step(self.whole, runtime=self.runtime).breakdown)
            return
        waiting = MemoryBreakdown.device({Category.INPUT: self._waiting_bytes(size)})
        _tell_monitors(trainer, estimate_step(self.profile, size, self.runtime).breakdown + waiting)

    def _waiting_bytes(self, size: int) -> int:
        """Return the bytes of the samples that wait on the device for their micro-batch."""
        assert self.profile.slopes is not None
        inputs = self.profile.events.categories == CATEGORIES.index(Category.INPUT)
        return max(0, self.local_batch_size - size) * round(float(self.profile.slopes[inputs].sum()))


def predict_sizes(trainer: Trainer, module: LightningModule) -> SizePrediction | None:
    """Predict the peak at any micro-batch size; if the step can't be traced, say why and return None."""
    try:
        batch = first_batch(trainer)
        local_batch_size = batch_size(batch)
        two = resize_batch(batch, local_batch_size, 2)
        profile = profile_fit(trainer, module, two, any_micro_batch=True, accumulate_grad_batches=2)
        whole = profile_fit(trainer, module, batch) if trainer.accumulate_grad_batches == 1 else None
    except (TraceError, ValueError) as error:
        rank_zero_info(f"MicroBatching: sizes are drawn from trial steps, for there is no prediction: {error}")
        return None
    if profile.slopes is None:
        rank_zero_info(f"MicroBatching: sizes are drawn from trial steps, for {profile.only_this_size}.")
        return None
    return SizePrediction(profile, runtime_of(trainer), local_batch_size, whole)


def emulation_of(trainer: Trainer) -> Emulation:
    """Return the device whose operators a trace must issue for this Trainer."""
    capability = compute_capability(trainer.strategy.root_device)
    return Emulation(CPU) if capability is None else Emulation(CUDA, capability)


def runtime_of(trainer: Trainer) -> RuntimeMemory | None:
    """Return the memory outside of a trace on the Trainer's device; None on the CPU."""
    capability = compute_capability(trainer.strategy.root_device)
    return None if capability is None else runtime_memory(capability)


class MemoryPrediction(Callback):
    """Predict the peak memory of a run before it starts, for the report at its end.

    It passes its figure to every `MemoryMonitor` of the Trainer. If the step can't be traced, it says why, and the run
    continues without a prediction. With `MicroBatching`, which predicts for the size it chooses, it does nothing.

    Attributes:
        estimate: The prediction; None before `fit` and if there is none.
    """

    def __init__(self) -> None:
        self.estimate: Estimate | None = None
        hide_idle_hooks(self)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Predict with a fake clone of the module."""
        if stage != "fit" or trainer.world_size > 1 or _others_predict(trainer):
            return
        try:
            profile = profile_fit(trainer, pl_module, first_batch(trainer))
        except (TraceError, ValueError) as error:
            rank_zero_warn(f"MemoryPrediction: no prediction for this run. {error}")
            return
        self.estimate = estimate_step(profile, runtime=runtime_of(trainer))
        _tell_monitors(trainer, self.estimate.breakdown)
        rank_zero_info(
            f"MemoryPrediction: peak {format_bytes(self.estimate.allocated_bytes)} in {self.estimate.phase} at "
            f"micro-batch {self.estimate.micro_batch_size}, predicted in {profile.seconds:.1f} s"
        )


def _others_predict(trainer: Trainer) -> bool:
    return any(getattr(callback, "predicts_memory", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _tell_monitors(trainer: Trainer, breakdown: MemoryBreakdown) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, MemoryMonitor):
            callback.predicted = breakdown
