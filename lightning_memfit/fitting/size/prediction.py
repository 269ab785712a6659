"""Predict a run's memory from inside its Trainer, before anything is allocated for it.

`SizePrediction` predicts the peak of any micro-batch size for `MicroBatching`; the callback `MemoryPrediction` predicts
that of the run as it is configured.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_memfit.device.runtime import RuntimeMemory, runtime_memory
from lightning_memfit.estimate.division import Division, NotDividedError, division_of, estimate_rank
from lightning_memfit.estimate.estimate import Estimate, estimate_step, predict_peak_bytes
from lightning_memfit.fitting.size.device_memory import rounding_of
from lightning_memfit.fitting.size.search import agrees, largest_by_exact, largest_under
from lightning_memfit.fitting.size.shapes import NoPrediction
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.memory import Category, MemoryBreakdown, format_bytes
from lightning_memfit.memory.attach import exchange_tensors, hide_idle_hooks
from lightning_memfit.memory.kind import CPU, CUDA, compute_capability
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.events import AlignmentError, EventList, fit_slopes
from lightning_memfit.profile.fake import give_up_memory, tensors_in
from lightning_memfit.profile.process import LostError, NoProcessError, Worker
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, TraceError
from lightning_memfit.techniques.core.first_batch import batches_per_epoch, first_batch
from lightning_memfit.techniques.core.precision import techniques_of

_MAX_SECONDS = 120.0  # of tracing, in one search


def profile_fit(
    trainer: Trainer,
    module: LightningModule,
    batch: Any,
    precision: str | None = None,
) -> ModelProfile:
    """Profile the training step that a Trainer is about to run.

    Call it in a callback's `setup`, when the model is not configured yet. Techniques that are already
    applied are removed during the trace, which applies them itself.

    Args:
        trainer: The Trainer that is about to fit.
        module: The Trainer's module, which is not changed.
        batch: A real batch of the size of interest.
        precision: Lightning's name of the precision to trace; by default that of the Trainer.

    Raises:
        TraceError: If the step can't be traced.
    """
    techniques = tuple(techniques_of(trainer))
    with _taken_off(techniques, trainer, module):
        return profile_module(
            module,
            batch,
            step_options(trainer, precision),
            emulation_of(trainer),
            techniques,
            any_micro_batch=False,
            cache=ProfileCache(),
        )


def step_options(trainer: Trainer, precision: str | None = None) -> StepOptions:
    """Return how a Trainer steps, but for its precision if one is given."""
    return StepOptions(
        precision or trainer.precision,  # type: ignore[arg-type]
        trainer.accumulate_grad_batches,
        trainer.gradient_clip_val,
        trainer.gradient_clip_algorithm,
    )


@contextmanager
def _taken_off(techniques: Sequence[Any], trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Leave techniques out, which traces apply themselves."""
    with ExitStack() as stack:
        for technique in reversed(techniques):  # left, and applied again, in their own order
            stack.enter_context(technique.taken_off(trainer, module))
        yield


def division_in_run(trainer: Trainer) -> Division | None:
    """How a run's strategy divides it, to predict a rank from a trace in one of its processes; None if it doesn't.

    Raises:
        NotDividedError: If a rank can't be predicted so.
    """
    ranks, name = trainer.world_size, type(trainer.strategy).__name__
    division = division_of(trainer.strategy, name, ranks, ranks // trainer.num_nodes)
    if division is not None and division.stage == 0:
        division = replace(division, in_closed_form=True)
    shares_sequences = getattr(trainer.strategy, "sequence_parallel_size", 1) > 1
    if division is not None and (division.traced or shares_sequences):
        raise NotDividedError("it can't be traced in a process of the run's group: predict it by `memfit estimate`")
    return division


def is_divided(trainer: Trainer) -> bool:
    """Whether a run's device holds less, or more, than a plain step on one device does."""
    try:
        return trainer.world_size > 1 or division_in_run(trainer) is not None
    except NotDividedError:
        return True


class SizePrediction:
    """The peak of a training step at any micro-batch size, whatever its curve: an `ExactPredictor` made by tracing.

    Sizes that replay two traces of small sizes are a rough prediction only: padding, attention over the batch and
    branches on shapes are not affine. So the size that it names is traced as well, and where the two disagree, further
    sizes are, until the largest that fits is bracketed. A trace takes time, but no memory of the device.

    A process keeps the module as it was before anything was configured (in a callback's `setup`), without its memory,
    so that traces can be made in the middle of training, for batches of new shapes. They come as training has them on
    the device, so that the transfer hooks do nothing there.

    Attributes:
        is_divided: Whether the run's device holds less, or more, than a plain step on one device does.

    Raises:
        NoProcessError: If this process can't be copied.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._module, self.is_divided = module, is_divided(trainer)
        self._techniques = tuple(techniques_of(trainer))
        self._options = step_options(trainer)
        self._emulation = emulation_of(trainer)
        self._rounding_bytes = rounding_of(trainer)
        with _taken_off(self._techniques, trainer, module):
            self._worker = Worker(module, self._techniques)
        self._worker.run(partial(_prepare, module))
        self._runtime = runtime_of(trainer)
        self._batch: Any = None
        self._take_of: Callable[[Any, int], Any] | None = None
        self._local_batch_size = 0
        self._profiles: dict[int, ModelProfile] = {}
        self._replayed: ModelProfile | None = None
        self._input_sizes: dict[int, int] = {}
        self._live: tuple[int, bool] | None = None
        self._traced_live_bytes: dict[bool, int] = {}

    def close(self) -> None:
        """End the process that keeps the module."""
        self._worker.close()

    def begin(self, batch: Any, local_batch_size: int, take: Callable[[Any, int], Any]) -> None:
        """Predict for a device's batch from now on; nothing is traced yet, and only a copy in host memory is kept.

        Args:
            batch: The batch.
            local_batch_size: Its samples.
            take: Returns the first samples of a batch as training would split it.
        """
        self._batch, self._local_batch_size, self._take_of = _on_host(batch), local_batch_size, take
        self._profiles, self._replayed, self._input_sizes = {}, None, {}

    def for_batch(self, batch: Any, local_batch_size: int, take: Callable[[Any, int], Any]) -> "SizePrediction":
        """Return a prediction for another batch; see `begin`."""
        other = copy.copy(self)
        other.begin(batch, local_batch_size, take)
        return other

    def whole(self, batch: Any) -> ModelProfile:
        """Return the profile of a step on a batch that isn't split."""
        self.begin(batch, 1, lambda batch, _: batch)
        return self._trace(1)

    def __call__(self, size: int) -> int:
        """Return the predicted peak in bytes, from a trace of that size unless a replay is known to be right."""
        if self._replayed is not None and size < self._local_batch_size:
            return self._peak_bytes(self._replayed, size)
        return self._traced_bytes(size)

    def largest_under(self, limit_bytes: int, upper: int) -> int:
        """Return the largest size from 1 to `upper` whose predicted peak is within the limit, or 0 if none is."""
        whole = self._local_batch_size
        if upper >= whole and self._traced_bytes(whole) <= limit_bytes:
            return whole
        upper = min(upper, whole - 1)  # gradients are alive in the forward of every micro-batch but the first
        if self._replayed is not None:
            return largest_under(self, limit_bytes, upper)
        known = {size: self._traced_bytes(size) for size in (2, 3) if size <= upper}
        known |= {size: self._traced_bytes(size) for size in self._profiles if size < whole}
        replayed = self._replay() if upper > max(known, default=upper) else None

        def replay(size: int) -> int:
            assert replayed is not None
            return self._peak_bytes(replayed, size)

        started = time.monotonic()
        found = largest_by_exact(
            self._traced_bytes,
            limit_bytes,
            upper,
            known,
            None if replayed is None else replay,
            lambda: time.monotonic() - started > _MAX_SECONDS,
        )
        traced = {size: self._traced_bytes(size) for size in self._profiles if size < whole}
        if replayed is not None and agrees(replay, traced):
            self._replayed = replayed
        return found

    def tell_monitors(self, trainer: Trainer, size: int) -> None:
        """Pass the prediction for the size in use to every `MemoryMonitor` of the Trainer, if it is exact.

        What a strategy divides is not in it, which suffices to look for a size.
        """
        has_monitor = any(isinstance(callback, MemoryMonitor) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if self._take_of is None or not has_monitor or is_divided(trainer):
            return
        try:
            known = self._replayed if size < self._local_batch_size else None
            profile = known if known is not None else self._trace(size)
        except NoPrediction:
            return
        waiting_bytes = self._input_bytes(self._local_batch_size) - self._input_bytes(size)
        waiting = MemoryBreakdown.device({Category.INPUT: waiting_bytes})
        at = None if known is None else size
        _tell_monitors(trainer, estimate_step(profile, at, self._runtime).breakdown + waiting)

    def calibrate(self, live_bytes: int, is_after_step: bool) -> None:
        """Say how many bytes are alive, with the whole batch: before the first step, or between two.

        What a trace can't know (workspaces of libraries, tensors of other callbacks) is then counted.
        """
        self._live = (live_bytes - self._input_bytes(self._local_batch_size), is_after_step)

    def bytes_beyond(self, batch: Any) -> int:
        """Return the bytes by which a batch is larger than the one that is predicted for."""
        with _disable_current_modes():
            return _bytes_of(batch) - self._input_bytes(self._local_batch_size)

    def _traced_bytes(self, size: int) -> int:
        return self._peak_bytes(self._trace(size), size)

    def _peak_bytes(self, profile: ModelProfile, size: int) -> int:
        """Return the peak at a size that a profile knows, with the samples that wait on the device for their turn."""
        at = profile.micro_batch_size if profile.slopes is None else size
        waiting_bytes = self._input_bytes(self._local_batch_size) - self._input_bytes(size)
        peak_bytes = predict_peak_bytes(profile, at, self._runtime, self._rounding_bytes)
        return peak_bytes + waiting_bytes + self._untraced_bytes(profile)

    def _untraced_bytes(self, profile: ModelProfile) -> int:
        """Return the bytes alive that a trace doesn't know; they are the same for every size."""
        if self._live is None:
            return 0
        live_bytes, is_after_step = self._live
        if is_after_step not in self._traced_live_bytes:
            events = profile.events
            at = _end_of_step(events) if is_after_step else (events.phases[0][0] if events.phases else len(events)) - 1
            traced = events.breakdown_at(at, self._rounding_bytes) if at >= 0 else MemoryBreakdown()
            runtime_bytes = self._runtime.allocated_bytes if self._runtime is not None else 0
            self._traced_live_bytes[is_after_step] = traced.total() - traced.get(Category.INPUT) + runtime_bytes
        return live_bytes - self._traced_live_bytes[is_after_step]

    def _trace(self, size: int) -> ModelProfile:
        """Trace a step of micro-batches that are all alike; of one, unless the Trainer accumulates, if it is the batch.

        Raises:
            NoPrediction: If the step can't be traced.
        """
        size = min(size, self._local_batch_size)
        if size not in self._profiles:
            options, least = self._options, 1 if size == self._local_batch_size else 2
            options = replace(options, accumulate_grad_batches=max(least, options.accumulate_grad_batches))
            with _disable_current_modes():
                batch = self._take(size)
            what = (self._module, batch, options, self._emulation, self._techniques)
            trace = partial(profile_module, *what, any_micro_batch=False, cache=ProfileCache())
            try:
                self._profiles[size] = self._worker.run(trace)
            except (TraceError, ValueError, LostError, NoProcessError) as error:
                raise NoPrediction(str(error)) from error
        return self._profiles[size]

    def _replay(self) -> ModelProfile | None:
        """The profile that sizes follow from if every storage grows in proportion; None if the structure differs."""
        two, three = self._trace(2), self._trace(3)
        try:
            events, slopes = fit_slopes(two.events, three.events, 2, 3)
        except AlignmentError:
            return None
        return replace(two, events=events, slopes=slopes, micro_batch_size=2, only_this_size="")

    def _take(self, size: int) -> Any:
        assert self._take_of is not None
        return self._batch if size == self._local_batch_size else self._take_of(self._batch, size)

    def _input_bytes(self, size: int) -> int:
        """Return the bytes of the batch's first samples."""
        if size not in self._input_sizes:
            with _disable_current_modes():
                self._input_sizes[size] = _bytes_of(self._take(size))
        return self._input_sizes[size]


def _bytes_of(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch))


def _end_of_step(events: EventList) -> int:
    """The last event of the last step, when what is alive stays alive until the next one."""
    return max(next((at for at, name in events.phases if name == "end"), len(events)) - 1, 0)


def _prepare(module: LightningModule) -> None:
    give_up_memory(module)
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        object.__setattr__(module, name, _unchanged)


def _on_host(batch: Any) -> Any:
    """A copy of a batch that keeps nothing of the device alive."""
    with _disable_current_modes():
        moved = move_data_to_device(batch, torch.device("cpu"))
        return exchange_tensors(moved, lambda tensor: tensor.detach().clone())


def _unchanged(batch: Any, *_: Any, **__: Any) -> Any:
    return batch


def predict_sizes(trainer: Trainer, module: LightningModule) -> SizePrediction | None:
    """Prepare to predict the peak at any micro-batch size; where there can be no traces, say why and return None."""
    try:
        return SizePrediction(trainer, module)
    except (LostError, NoProcessError) as error:
        rank_zero_warn(f"MicroBatching: the size grows in the first steps, for no step can be traced here: {error}.")
        return None


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

    It passes its figure to every `MemoryMonitor` of the Trainer. Where a batch can't be read before the run, it says so
    and predicts from the first batch that training gets. If the step can't be traced, or the run has several ranks
    (`memfit estimate` predicts these), it says so, and the run continues without a prediction. DeepSpeed on one device
    is predicted as `memfit estimate` does. With `MicroBatching`, which predicts its own size, it does nothing.

    Attributes:
        estimate: The prediction; None before `fit` and if there is none.
    """

    def __init__(self) -> None:
        self.estimate: Estimate | None = None
        hide_idle_hooks(self)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Predict in another process."""
        vars(self)["on_train_batch_start"] = None
        if stage != "fit" or finds_its_size(trainer):
            return
        if trainer.world_size > 1:
            rank_zero_info(
                f"MemoryPrediction: no prediction for this run, as it has {trainer.world_size} ranks. `memfit estimate "
                "--config ...` shows what one of them takes under the strategy and devices of a recipe."
            )
            return
        try:
            division = division_in_run(trainer)
            try:
                batch = first_batch(trainer)
            except ValueError as error:
                if division is not None:
                    raise
                self._wait_for_batch(trainer, pl_module, error)
                return
            precision = None if division is None else division.traced_precision(str(trainer.precision))
            profile = profile_fit(trainer, pl_module, batch, precision=precision)
        except NotDividedError as error:
            name = type(trainer.strategy).__name__
            rank_zero_info(f"MemoryPrediction: no prediction for this run under {name}: {error}.")
            return
        except (TraceError, ValueError) as error:
            if not getattr(error, "in_build", False):  # else Lightning is about to end in the same mistake
                rank_zero_warn(f"MemoryPrediction: no prediction for this run. {error}")
            return
        self._predict(trainer, profile, division)

    def _wait_for_batch(self, trainer: Trainer, module: LightningModule, reason: ValueError) -> None:
        """Predict, once, from the first batch that training gets."""
        try:
            sizes = SizePrediction(trainer, module)
        except (LostError, NoProcessError) as error:
            rank_zero_warn(
                f"MemoryPrediction: no prediction for this run. {reason} No step can be traced here: {error}"
            )
            return
        rank_zero_warn(f"MemoryPrediction: the prediction comes with the first batch of training. {reason}")

        def predict(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
            vars(self)["on_train_batch_start"] = None
            try:
                self._predict(trainer, sizes.whole(batch), None)
            except NoPrediction as error:
                rank_zero_warn(f"MemoryPrediction: no prediction for this run. {error}")
            finally:
                sizes.close()

        vars(self)["on_train_batch_start"] = predict

    def _predict(self, trainer: Trainer, profile: ModelProfile, division: Division | None) -> None:
        if profile.growth is not None:
            profile = profile.after(batches_per_epoch(trainer) or 0)
        for caution in profile.cautions:
            rank_zero_warn(f"MemoryPrediction: {caution}")
        try:
            self.estimate = estimate_rank(profile, division, runtime=runtime_of(trainer))
        except NotDividedError as error:
            rank_zero_warn(f"MemoryPrediction: no prediction for this run: {error}.")
            return
        on_host = profile.device_kind.is_host
        _tell_monitors(trainer, self.estimate.breakdown.tensors() if on_host else self.estimate.breakdown)
        rank_zero_info(
            f"MemoryPrediction: peak {format_bytes(self.estimate.allocated_bytes)} in {self.estimate.phase} at "
            f"micro-batch {self.estimate.micro_batch_size}, predicted in {profile.seconds:.1f} s"
        )


def finds_its_size(trainer: Trainer) -> bool:
    """Whether a callback of a Trainer finds the micro-batch, and predicts memory for it."""
    return any(getattr(callback, "predicts_memory", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _tell_monitors(trainer: Trainer, breakdown: MemoryBreakdown) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, MemoryMonitor):
            callback.predicted = breakdown
