"""One run of `fit`: choosing the micro-batch size on the first batch, then running every step with it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lightning_memfit.fitting.recovery.ladder import Ladder, LastResort, rungs_up_to
from lightning_memfit.fitting.recovery.postmortem import explain
from lightning_memfit.fitting.recovery.rollback import Rewind, RewindPoint
from lightning_memfit.fitting.size.device_memory import MemoryGauge, allocation_retries
from lightning_memfit.fitting.size.loss_checks import check_batch_statistics, check_coupling
from lightning_memfit.fitting.size.search import Found, PeakPredictor, lengthened, longest_samples
from lightning_memfit.fitting.size.sizes import MicroBatchSize, prefer
from lightning_memfit.fitting.size.trial import NothingFits, Trial, describe, fit_size
from lightning_memfit.fitting.step.effective_step import EffectiveStep, StepParts
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.outputs import StepMetrics
from lightning_memfit.fitting.step.ranks import Agreement, GradientReducer
from lightning_memfit.fitting.step.split import BatchSplitter, LossWeight, SampleWeights, predicts_next_token, weigh
from lightning_memfit.memory.kind import DeviceKind, hardware_name
from lightning_memfit.memory.replicas import num_replicas

# `global_batch_size` = loader batch x devices x `accumulate_grad_batches`, checked and where possible arranged.


def share_of(trainer: Trainer, global_batch_size: int) -> int:
    """The batch size the loader of one device must have.

    Raises:
        MisconfigurationException: If the global batch can't be divided so.
    """
    parts = num_replicas(trainer) * trainer.accumulate_grad_batches
    if global_batch_size % parts:
        raise MisconfigurationException(
            f"`global_batch_size={global_batch_size}` can't be divided by {num_replicas(trainer)} devices x "
            f"`accumulate_grad_batches={trainer.accumulate_grad_batches}`. Take a multiple of {parts}."
        )
    return global_batch_size // parts


def lend_batch_size(trainer: Trainer, module: LightningModule, share: int) -> tuple[Any, int] | None:
    """Set `batch_size` of the datamodule or module that makes the loaders to the share.

    Returns:
        Its owner and the value it had, for putting back; None if there is none or it was right.
    """
    datamodule = getattr(trainer, "datamodule", None)
    if not trainer.fit_loop._data_source.is_module():
        return None
    for owner in (datamodule, module) if datamodule is not None else (module,):
        before = getattr(owner, "batch_size", None)
        if isinstance(before, int) and not isinstance(before, bool):
            if before == share:
                return None
            owner.batch_size = share
            rank_zero_info(f"MicroBatching: `batch_size` of the {type(owner).__name__} is {share} instead of {before}.")
            return owner, before
    return None


def loader_batch_size(trainer: Trainer) -> int | None:
    """Batch size of the training loader, None if it doesn't tell (or there are several)."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def check_global_batch(trainer: Trainer, global_batch_size: int, found: int) -> None:
    """Check the batch size that the loader delivers.

    Raises:
        MisconfigurationException: If the effective batch would be another than the one asked for.
    """
    share = share_of(trainer, global_batch_size)
    if found != share:
        accumulate, replicas = trainer.accumulate_grad_batches, num_replicas(trainer)
        raise MisconfigurationException(
            f"`global_batch_size={global_batch_size}`, but the training loader delivers {found} x {replicas} devices "
            f"x `accumulate_grad_batches={accumulate}` = {found * replicas * accumulate}. Set the loader's "
            f"`batch_size` to {share}; micro-batches are cut from it."
        )


# ===


_STEPS_BETWEEN_CHECKS = 16
_MANY_RETRIES = 4
_HINT = "`MicroBatching(last_resort='offload')` recomputes activations and uses host memory before it gives up."


@dataclass(frozen=True)
class Options:
    """The arguments of `MicroBatching` that concern training."""

    global_batch_size: int | None
    micro_batch_size: int | Literal["auto"]
    allow_batch_statistics: bool
    max_sequence_length: int | None
    recover: bool
    last_resort: LastResort
    predictor: PeakPredictor | None
    limit_bytes: int | None
    advise: Callable[[], str] | None


class FitSession:
    """Everything `MicroBatching` needs between the start and the end of training.

    Args:
        loop: The loop in training.
        options: What the user asked for.
        splitter: Splits batches.
        loss_weight: The user's weight of a batch.
        gauge: The device's memory.
        note: Told every choice and change of the size.

    Attributes:
        sizes: The size in use, None before the first batch.
        found: What the search found, None where there was none.
    """

    def __init__(
        self,
        loop: MicroBatchLoop,
        options: Options,
        splitter: BatchSplitter,
        loss_weight: LossWeight | None,
        gauge: MemoryGauge | None,
        note: Callable[[int, str], None],
    ) -> None:
        trainer, module = loop.trainer, loop.module
        self._loop = loop
        self._options = options
        self._splitter = splitter
        self._loss_weight = loss_weight
        self._gauge = gauge
        self._note = note
        self._device = trainer.strategy.root_device
        self._shifted = predicts_next_token(module)
        self._is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
        self._agreement = Agreement(trainer.world_size)
        # Made before any trial, which then measures its buffer, too.
        self._reducer = GradientReducer(module.parameters()) if self._is_ddp else None
        if self._is_ddp:
            # DistributedDataParallel would broadcast buffers in the first forward; we do it after each step.
            trainer.strategy.model.require_forward_param_sync = False  # type: ignore[union-attr]
        # A CPU without a simulated device has one memory only.
        kind = DeviceKind.of(self._device)
        has_host = kind.has_own_memory or (kind.is_host and gauge is not None)
        rungs = rungs_up_to(options.last_resort, module, trainer.optimizers[0], has_host, trainer.num_devices)
        self._ladder = Ladder(rungs, self._agreement)
        self._expected: int | None = None
        self._retries = 0
        self._num_steps = 0
        self._step: EffectiveStep | None = None
        self.sizes: MicroBatchSize | None = None
        self.found: Found | None = None

    def check_loader(self) -> None:
        """Check the loader against `global_batch_size`, as far as it tells its batch size."""
        self._expected = loader_batch_size(self._loop.trainer)
        if self._options.global_batch_size is not None and self._expected is not None:
            check_global_batch(self._loop.trainer, self._options.global_batch_size, self._expected)

    def close(self) -> None:
        """Give up what ranks share, and have everything where it was before."""
        self._agreement.close()
        self._ladder.close()

    def kept(self) -> dict[str, Any]:
        """What a later run needs to reuse the size and the rungs of the ladder."""
        assert self.sizes is not None
        return {"micro_batch_size": self.sizes.target, "rungs": self._ladder.names, **self._setting()}

    def run(self, request: StepRequest, kept: dict[str, Any]) -> ClosureResult:
        """Run one loader batch, after choosing the size if it is the first."""
        if self._step is None:
            self._step = self._start(request, kept)
        self._watch_allocator()
        return self._step.run(request)

    # --- the first batch --------------------------------------------------------------------------------------------

    def _start(self, request: StepRequest, kept: dict[str, Any]) -> EffectiveStep:
        share = self._splitter.count(request.batch, self._expected)
        if self._options.global_batch_size is not None and self._expected is None:
            check_global_batch(self._loop.trainer, self._options.global_batch_size, share)
        again = self._ladder.climb_to(kept.get("rungs", ())) if self._is_as(kept) else None
        size, reason = self._choose(request, share, kept)
        # All ranks go by the smallest; their shares may differ.
        size = int(min(theirs for (theirs,) in self._agreement.exchange(size)))
        if size < share and not self._options.allow_batch_statistics:
            check_batch_statistics(self._loop.module)
            check_coupling(self._loop, request, self._splitter, share, self._shifted, self._loss_weight)
        self.sizes = MicroBatchSize(share, size)
        self._note(size, f"{reason} As before, with {again}." if again else reason)
        return EffectiveStep(self._parts(self.sizes))

    def _choose(self, request: StepRequest, share: int, kept: dict[str, Any]) -> tuple[int, str]:
        wanted = self._options.micro_batch_size
        if wanted != "auto":
            return min(
                wanted, share
            ), f"MicroBatching: micro-batch {min(wanted, share)} of {share} samples, as asked for."
        if kept.get("micro_batch_size") and self._is_as(kept):
            size = min(share, int(kept["micro_batch_size"]))
            return size, f"MicroBatching: micro-batch {size} of {share} samples, as in the checkpoint."
        limit_bytes = self._options.limit_bytes or (self._gauge.limit_bytes if self._gauge is not None else None)
        if limit_bytes is None:
            return share, (
                f"MicroBatching: the whole share of {share} samples at once; no memory limit is known for "
                f"{self._device.type}. Add a `MemoryLimit` or set `micro_batch_size`."
            )
        started = time.monotonic()
        try:
            found = self._find(request, share, limit_bytes)
        except NothingFits as error:
            if self._options.last_resort == "none":
                raise torch.OutOfMemoryError(f"{error} {_HINT}") from error
            return 1, "MicroBatching: as it is, not even one sample fits; training begins with one and saves memory."
        size = prefer(share, found.largest)
        return size, describe(found, size, share, limit_bytes, time.monotonic() - started)

    def _find(self, request: StepRequest, share: int, limit_bytes: int) -> Found:
        batch = self._worst_case(request.batch, share)
        worst = replace(request, arguments=request.arguments.copy())
        with Trial(self._loop, worst, batch, self._splitter, share, self._gauge, self._agreement) as trial:
            found = fit_size(trial, share, limit_bytes, self._options.predictor)
            self.found = replace(found, num_trials=trial.num_steps)
        return self.found

    def _worst_case(self, batch: Any, share: int) -> Any:
        longest = longest_samples(self._loop.trainer.train_dataloader, share)
        if longest is not None:
            return self._loop.to_device(longest)
        if self._options.max_sequence_length is not None:
            return lengthened(batch, self._options.max_sequence_length)
        return batch

    def _is_as(self, kept: dict[str, Any]) -> bool:
        return all(kept.get(key) == value for key, value in self._setting().items())

    def _setting(self) -> dict[str, Any]:
        trainer = self._loop.trainer
        name = hardware_name(self._device)
        limit_bytes = self._options.limit_bytes
        if limit_bytes is None and self._gauge is not None and not DeviceKind.of(self._device).has_caching_allocator:
            limit_bytes = self._gauge.limit_bytes
        return {"device": name, "world_size": trainer.world_size, "limit_bytes": limit_bytes}

    # --- every batch ------------------------------------------------------------------------------------------------

    def _parts(self, sizes: MicroBatchSize) -> StepParts:
        trainer, module = self._loop.trainer, self._loop.module
        metrics = StepMetrics(module)
        is_alone = trainer.world_size == 1
        return StepParts(
            loop=self._loop,
            splitter=self._splitter,
            sizes=sizes,
            agreement=self._agreement,
            reducer=self._reducer,
            rewind=Rewind(module, metrics, self._device),
            metrics=metrics,
            weigh=self._weigh,
            explain=self._explain,
            ladder=self._ladder,
            on_change=self._note,
            recover=self._options.recover and (is_alone or self._is_ddp),
            averages_ranks=not is_alone and not self._is_ddp,
        )

    def _weigh(self, batch: Any) -> tuple[int, SampleWeights]:
        num_samples = self._splitter.count(batch, self._expected)
        return num_samples, weigh(batch, num_samples, self._shifted, self._loss_weight)

    def _explain(self, request: StepRequest, point: RewindPoint) -> str:
        count = self._splitter.count(request.batch, self._expected)
        part = self._splitter.split(request.batch, [1, count - 1] if count > 1 else [1])[0]

        def run() -> None:
            loss = self._loop.forward(request, part, 1.0).closure_loss
            if loss is not None:
                self._loop.backward(request, loss, announce=False)

        text = explain(self._loop.module, self._loop.trainer.optimizers, run, self._options.advise)
        self._loop.settle_after_failure(point.hook_name)
        return text if self._options.last_resort == "offload" else f"{text}\n{_HINT}"

    def _watch_allocator(self) -> None:
        """Lower the size where the caching allocator keeps emptying its cache, which costs far more than one pass."""
        self._num_steps += 1
        cached = DeviceKind.of(self._device).has_caching_allocator
        if not cached or self._num_steps % _STEPS_BETWEEN_CHECKS or self.sizes is None:
            return
        before, self._retries = self._retries, allocation_retries(self._device)
        if self._retries - before >= _MANY_RETRIES and self.sizes.current > 1:
            size = self.sizes.shrink(self.sizes.current)
            rank_zero_info(
                f"MicroBatching: memory is so tight that the allocator is thrashing; micro-batch {size} now."
            )
            self._note(size, f"{self._retries - before} allocation retries in {_STEPS_BETWEEN_CHECKS} steps")
