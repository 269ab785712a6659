"""`FitSession`: what one run of `fit` needs from the start of training to its end.

It checks that the loader delivers what `global_batch_size` asks for, and names the micro-batch size of the first steps,
which train as any other. From then on an `EffectiveStep` runs every batch without the session.
"""

import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import BatchSampler

from lightning_memfit.fitting.recovery.guard import StepGuard
from lightning_memfit.fitting.recovery.last_resort import LastResort, Recomputation
from lightning_memfit.fitting.recovery.rollback import RandomState
from lightning_memfit.fitting.size.device_memory import DeviceMemory
from lightning_memfit.fitting.size.search import SizeSearch, StepMemory, longest_samples
from lightning_memfit.fitting.size.shapes import ShapeGuard, shape_of
from lightning_memfit.fitting.size.sizes import MicroBatchSize, prefer
from lightning_memfit.fitting.step.effective_step import EffectiveStep
from lightning_memfit.fitting.step.gradient_reducer import GradientReducer
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.loss_weights import LossWeights
from lightning_memfit.fitting.step.passes import PartFailedError
from lightning_memfit.fitting.step.shortage import Shortage
from lightning_memfit.fitting.step.split import BatchSplitter
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.kind import DeviceKind, hardware_name
from lightning_memfit.memory.replicas import num_replicas, sum_by_loop
from lightning_memfit.reliability.consensus import At, RankConsensus
from lightning_memfit.reliability.upstream.deepspeed import engine_of

if TYPE_CHECKING:
    from lightning_memfit.fitting.size.prediction import SizePrediction

_ON_DISK = (
    "`MicroBatching` compares steps, which can't be taken back where DeepSpeed keeps optimizer states or "
    "weights on disk. Set the loader's batch size to the micro-batch and `accumulate_grad_batches` to the number of "
    "micro-batches; `memfit estimate` says which micro-batch fits."
)
_HINT = "`MicroBatching(last_resort='recompute')` recomputes activations before it gives up."

# --- `global_batch_size` = loader batch x devices x `accumulate_grad_batches` ---------------------------------------


def local_batch_size_for(trainer: Trainer, global_batch_size: int) -> int:
    """Return the batch size that the loader of one device must have.

    Raises:
        MisconfigurationException: If the global batch can't be divided by devices and accumulation.
    """
    parts = num_replicas(trainer) * trainer.accumulate_grad_batches
    if global_batch_size % parts:
        raise MisconfigurationException(
            f"`global_batch_size={global_batch_size}` can't be divided by {num_replicas(trainer)} devices x "
            f"`accumulate_grad_batches={trainer.accumulate_grad_batches}`. Take a multiple of {parts}."
        )
    return global_batch_size // parts


def lend_batch_size(trainer: Trainer, module: LightningModule, size: int) -> tuple[Any, int] | None:
    """Set `batch_size` of the datamodule or module that makes the loaders to what they must deliver.

    Returns:
        Its owner and former value, to restore it later; None if there is none or it was already right.
    """
    datamodule = getattr(trainer, "datamodule", None)
    if not trainer.fit_loop._data_source.is_module():
        return None
    for owner in (datamodule, module) if datamodule is not None else (module,):
        before = getattr(owner, "batch_size", None)
        if isinstance(before, int) and not isinstance(before, bool):
            if before == size:
                return None
            owner.batch_size = size
            rank_zero_info(f"MicroBatching: `batch_size` of the {type(owner).__name__} is {size} instead of {before}.")
            return owner, before
    return None


def loader_batch_size(trainer: Trainer) -> int | None:
    """Return the batch size of the training loader; None if it is unknown or there are several loaders."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def loader_remainder(trainer: Trainer) -> int | None:
    """Return the samples of the training loader's last batch if that is smaller, as far as its sampler tells."""
    loader, size = trainer.train_dataloader, loader_batch_size(trainer)
    sampler = getattr(loader, "batch_sampler", None)
    if size is None or type(sampler) is not BatchSampler or sampler.drop_last:
        return None
    try:
        return len(sampler.sampler) % size  # type: ignore[arg-type]
    except TypeError:
        return None


def check_global_batch(trainer: Trainer, global_batch_size: int, found: int) -> None:
    """Check the batch size that the loader delivers.

    Raises:
        MisconfigurationException: If the effective batch would differ from the one asked for.
    """
    wanted = local_batch_size_for(trainer, global_batch_size)
    if found != wanted:
        accumulate, replicas = trainer.accumulate_grad_batches, num_replicas(trainer)
        raise MisconfigurationException(
            f"`global_batch_size={global_batch_size}`, but the training loader delivers {found} x {replicas} devices "
            f"x `accumulate_grad_batches={accumulate}` = {found * replicas * accumulate}. Set the loader's "
            f"`batch_size` to {wanted}; micro-batches are cut from it."
        )


# --- the run --------------------------------------------------------------------------------------------------------


def _unguarded(_: Optimizer) -> AbstractContextManager[None]:
    """Guard no steps: those of an engine communicate, and can't be repeated by one rank."""
    return nullcontext()


@dataclass(frozen=True)
class Options:
    """The arguments of `MicroBatching` that concern training."""

    global_batch_size: int | None
    micro_batch_size: int | Literal["auto"]
    allow_batch_statistics: bool
    recover: bool
    last_resort: LastResort
    limit_bytes: int | None


class FitSession:
    """One run of `fit` from the start of training on.

    Its constructor creates what all ranks share, and makes the loop call the session for the first batch.

    Args:
        loop: The loop in training.
        options: The user's options.
        prediction: Predicts the peak at any size; None if there are no traces.
        splitter: Splits batches.
        weights: Weighs micro-batches.
        device_memory: The device's memory; None if it has no known limit.
        kept: What an earlier run found, as `kept` returns it; used on the same device with as many ranks.
        note: Called with the size and the reason at every choice and change.
        consensus: Communication between the ranks.

    Attributes:
        sizes: The size in use; None before the first batch.
        found: What the search has found so far; None if there is none.

    Raises:
        MisconfigurationException: If the loader's batch size contradicts `global_batch_size`.
    """

    def __init__(
        self,
        loop: MicroBatchLoop,
        options: Options,
        prediction: "SizePrediction | None",
        splitter: BatchSplitter,
        weights: LossWeights,
        device_memory: DeviceMemory | None,
        kept: dict[str, Any],
        note: Callable[[int, str], None],
        consensus: RankConsensus,
    ) -> None:
        trainer, module = loop.trainer, loop.module
        loader_size = loader_batch_size(trainer)
        if options.global_batch_size is not None and loader_size is not None:
            check_global_batch(trainer, options.global_batch_size, loader_size)
        self._loop = loop
        self._options = options
        self._prediction = prediction
        self._splitter = splitter
        self._weights = weights
        self._memory = device_memory
        self._kept = kept
        self._note = note
        self._device: torch.device = trainer.strategy.root_device
        self._consensus = consensus
        loop.engine = engine_of(trainer)
        if loop.engine is not None and loop.engine.is_on_disk:
            raise MisconfigurationException(_ON_DISK)
        consensus.settle()
        self._reducer: GradientReducer | None = None
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self._reducer = GradientReducer(module)
            # DistributedDataParallel would broadcast buffers in the first forward; we do it after each step.
            sum_by_loop(trainer.strategy.model)
        self._recomputation = Recomputation(module, options.last_resort == "recompute", consensus)
        self.sizes: MicroBatchSize | None = None
        self._search: SizeSearch | None = None
        self._step: EffectiveStep
        self._shape: Any = None  # of the batch that sizes are predicted for, or that was measured
        self._is_alike = True
        self._limit_bytes = 0
        self._work_bytes: int | None = None  # that the step before this batch took, without its optimizer step
        self._num_failed = 0
        self._started = 0.0
        loop.guard = StepGuard() if loop.engine is None else _unguarded
        loop.run_step = self._run_first

    @property
    def found(self) -> SizeSearch | None:
        """The search with what it has found so far; None if there is none."""
        return self._search

    def close(self) -> None:
        """Recompute nothing any more."""
        self._recomputation.close()

    def kept(self) -> dict[str, Any]:
        """Return what a later run needs to reuse the size."""
        assert self.sizes is not None
        return {"micro_batch_size": self.sizes.current, **self._setting()}

    # --- the first batch --------------------------------------------------------------------------------------------

    def _run_first(self, request: StepRequest) -> ClosureResult:
        """Choose the size and run the batch; when the search has ended the loop calls the step itself."""
        self._consensus.settle()
        share_added = getattr(self._loop.trainer.strategy, "share_added", None)
        if self._reducer is not None and share_added is not None:
            share_added()
        options = self._options
        self.sizes = sizes = MicroBatchSize(self._splitter.count(request.batch), 1)
        hint = "" if options.last_resort == "recompute" else _HINT
        shortage = Shortage(self._loop, self._splitter, sizes, self._recomputation, self._note, hint)
        self._step = EffectiveStep(
            self._loop,
            self._splitter,
            self._weights,
            sizes,
            self._consensus,
            self._reducer,
            options.recover,
            shortage,
            self._memory,
            options.allow_batch_statistics,
        )
        self._start(request, sizes)
        self._loop.run_step = self._step.run
        if self._search is not None:
            self._loop.run_step = partial(self._run_searching, self._search, sizes)
        return self._loop.run_step(request)

    def _start(self, request: StepRequest, sizes: MicroBatchSize) -> None:
        if self._options.global_batch_size is not None and loader_batch_size(self._loop.trainer) is None:
            check_global_batch(self._loop.trainer, self._options.global_batch_size, sizes.local_batch_size)
        size, reason = self._choose(request, sizes)
        # All ranks use the smallest size; their batches may differ.
        size = int(min(theirs for (theirs,) in self._consensus.exchange(size, at=At.BATCH)))
        wanted = self._options.micro_batch_size
        is_unlimited = wanted == "auto" and self._options.limit_bytes is None and self._memory is None
        sizes.begin(size, sys.maxsize if is_unlimited else size if wanted == "auto" else max(size, wanted))
        self._note(size, reason)

    def _choose(self, request: StepRequest, sizes: MicroBatchSize) -> tuple[int, str]:
        wanted, kept, local_batch_size = self._options.micro_batch_size, self._kept, sizes.local_batch_size
        if wanted != "auto":
            size = min(wanted, local_batch_size)
            self._predict_for(request.batch, local_batch_size)
            return size, f"MicroBatching: micro-batch {size} of {local_batch_size} samples, as asked for."
        limit_bytes = self._options.limit_bytes or (self._memory.limit_bytes if self._memory is not None else None)
        if kept.get("micro_batch_size") and self._is_as_kept():
            size = min(local_batch_size, int(kept["micro_batch_size"]))
            self._predict_for(request.batch, local_batch_size)
            self._step.shapes = self._guard(shape_of(request.batch), size, limit_bytes)
            return size, f"MicroBatching: micro-batch {size} of {local_batch_size} samples, as in the checkpoint."
        if limit_bytes is None:
            return local_batch_size, (
                f"MicroBatching: the whole share of {local_batch_size} samples at once; no memory limit is known for "
                f"{self._device.type}. Add a `MemoryLimit` or set `micro_batch_size`."
            )
        return self._begin_search(request, sizes, limit_bytes)

    # --- the first steps, which show which size is best -------------------------------------------------------------

    def _begin_search(self, request: StepRequest, sizes: MicroBatchSize, limit_bytes: int) -> tuple[int, str]:
        """Name the size of the first step, predicted for the longest samples of the data."""
        self._started, local_batch_size = time.monotonic(), sizes.local_batch_size
        memory, batch = self._memory, self._worst_case(request.batch, local_batch_size)
        self._predict_for(batch, local_batch_size)
        self._search = search = SizeSearch(
            local_batch_size,
            limit_bytes,
            self._prediction,
            self._step.can_fail,
            memory is not None,
            self._smallest,
        )
        has_states = any(optimizer.state for optimizer in self._loop.trainer.optimizers)  # of a run that is resumed
        largest = search.first(None if memory is None or has_states else self._highest(memory.live_bytes))
        if search.no_prediction:
            why = f"for there is no prediction: {search.no_prediction}"
            rank_zero_info(f"MicroBatching: the size grows in the first steps, {why}")
        self._shape = shape_of(batch if search.is_predicted else request.batch)
        self._limit_bytes = limit_bytes
        self._step.shapes = self._guard(self._shape, largest, limit_bytes)
        sizes.name_smaller = lambda failed: prefer(local_batch_size, search.fail(failed))
        size = prefer(local_batch_size, largest)
        return size, self._described(search, size, local_batch_size)

    def _run_searching(self, search: SizeSearch, sizes: MicroBatchSize, request: StepRequest) -> ClosureResult:
        """Run a batch of the first steps, and measure what a step takes."""
        memory = self._memory
        if request.is_complete:
            return self._step.run(request)
        if request.zero_grad is not None:
            if self._work_bytes is not None:
                self._learn(search, sizes, request.batch, self._work_bytes)
                if search.is_done:
                    sizes.begin(sizes.current, sizes.current)
                    sizes.name_smaller, self._loop.run_step = None, self._step.run
                    return self._step.run(request)
            self._is_alike = True
            self._num_failed = search.num_failed
            if memory is not None:
                memory.reset_peak()
        shape, count = shape_of(request.batch), self._splitter.count(request.batch)
        if not search.is_predicted and count == sizes.local_batch_size:
            self._shape = shape
        self._is_alike &= shape == self._shape
        result = self._run_or_enlarge(search, sizes, request)
        if request.is_last:
            self._work_bytes = 0 if memory is None else memory.peak_bytes
        return result

    def _run_or_enlarge(self, search: SizeSearch, sizes: MicroBatchSize, request: StepRequest) -> ClosureResult:
        """Run a batch, at the beginning of the run with more samples at once if the module can't run so few."""
        while True:
            try:
                return self._step.run(request)
            except PartFailedError:
                size = search.needs_more(sizes.current)
                if not size:
                    raise
            sizes.begin(size, size)
            self._note(size, "the module can't run fewer samples")

    def _learn(self, search: SizeSearch, sizes: MicroBatchSize, batch: Any, work_bytes: int) -> None:
        """Take what the step before this batch has shown, and go on with the size that the search names."""
        memory, before = self._memory, sizes.current
        peak_bytes, rest_bytes = (0, 0) if memory is None else (memory.peak_bytes, memory.live_bytes)
        if self._prediction is not None:
            rest_bytes -= self._prediction.bytes_beyond(batch)
        is_alike = self._is_alike and search.num_failed == self._num_failed
        told = self._consensus.exchange(work_bytes, peak_bytes, rest_bytes, not is_alike, at=At.BATCH)
        work, peak, rest, unlike = (int(max(numbers)) for numbers in zip(*told, strict=True))
        largest = search.after(StepMemory(before, peak, work, rest, not unlike))
        size = prefer(sizes.local_batch_size, largest)
        if size != before:
            sizes.begin(size, size)
            self._step.shapes = self._guard(self._shape, largest, self._limit_bytes - search.missed_bytes)
            self._note(size, self._described(search, size, sizes.local_batch_size))

    def _described(self, search: SizeSearch, size: int, local_batch_size: int) -> str:
        """Return one line that says which size is in use, and why."""
        why = "so far"
        if search.num_steps:
            why = "by what the first steps took"
        elif search.predicted_bytes is not None and search.predicted_bytes > self._limit_bytes:
            return (
                f"MicroBatching: not even one sample fits {format_bytes(self._limit_bytes)}, by its prediction of "
                f"{format_bytes(search.predicted_bytes)}; training begins with one, and saves memory where it can."
            )
        elif search.predicted_bytes is not None:
            why = f"by its prediction of {format_bytes(search.predicted_bytes)}"
        return (
            f"MicroBatching: micro-batch {size} x {math.ceil(local_batch_size / size)} for {local_batch_size} samples "
            f"per device; {format_bytes(self._limit_bytes)} have room for {search.largest}, {why} "
            f"({time.monotonic() - self._started:.1f} s)."
        )

    def _smallest(self, number: int) -> int:
        return int(min(theirs for (theirs,) in self._consensus.exchange(number, at=At.BATCH)))

    def _highest(self, number: int) -> int:
        return int(max(theirs for (theirs,) in self._consensus.exchange(number, at=At.BATCH)))

    def _guard(self, shape: Any, size: int, limit_bytes: int | None) -> ShapeGuard:
        """Return what gives batches of larger shapes than this one a smaller size."""
        prediction = self._prediction
        if prediction is None or limit_bytes is None:
            return ShapeGuard(shape, size, None)

        def predict(other: Any, upper: int) -> int:
            count = self._splitter.count(other)
            found = prediction.for_batch(other, count, self._take).largest_under(limit_bytes, min(upper, count))
            return upper if found == count else found

        return ShapeGuard(shape, size, predict)

    def _take(self, batch: Any, size: int) -> Any:
        """Return the first samples of a batch, as they are split in training."""
        rest = self._splitter.count(batch) - size
        return self._splitter.split(batch, [size, rest])[0] if rest > 0 else batch

    def _predict_for(self, batch: Any, local_batch_size: int) -> None:
        if self._prediction is not None:
            self._prediction.begin(batch, local_batch_size, self._take)

    def _worst_case(self, batch: Any, local_batch_size: int) -> Any:
        random = RandomState(self._device)  # from which data sets, collators and transfers may draw
        try:
            longest = longest_samples(self._loop.trainer.train_dataloader, local_batch_size)
            return batch if longest is None else self._loop.to_device(longest)
        finally:
            random.restore()

    def _is_as_kept(self) -> bool:
        return all(self._kept.get(key) == value for key, value in self._setting().items())

    def _setting(self) -> dict[str, Any]:
        trainer = self._loop.trainer
        name = hardware_name(self._device)
        limit_bytes = self._options.limit_bytes
        if limit_bytes is None and self._memory is not None and not DeviceKind.of(self._device).has_caching_allocator:
            limit_bytes = self._memory.limit_bytes
        return {"device": name, "world_size": trainer.world_size, "limit_bytes": limit_bytes}
