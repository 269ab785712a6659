"""`FitSession`: what one run of `fit` needs from the start of training to its end.

It checks that the loader delivers what `global_batch_size` asks for, and names the micro-batch size of the first steps,
which train as any other. From then on an `EffectiveStep` runs every batch without the session.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import BatchSampler

from lightning_memfit.fitting.recovery.guard import StepGuard
from lightning_memfit.fitting.size.sizes import MicroBatchSize
from lightning_memfit.fitting.step.effective_step import EffectiveStep
from lightning_memfit.fitting.step.loop import Fitting, StepRequest
from lightning_memfit.memory.kind import DeviceKind, hardware_name
from lightning_memfit.memory.replicas import num_replicas, sum_by_loop
from lightning_memfit.reliability.consensus import At
from lightning_memfit.reliability.upstream.deepspeed import engine_of

if TYPE_CHECKING:
    from lightning_memfit.fitting.step.first_steps import FirstSteps

_ON_DISK = (
    "`MicroBatching` compares steps, which can't be taken back where DeepSpeed keeps optimizer states or "
    "weights on disk. Set the loader's batch size to the micro-batch and `accumulate_grad_batches` to the number of "
    "micro-batches; `memfit estimate` says which micro-batch fits."
)

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


class FitSession:
    """One run of `fit` from the start of training on.

    Its constructor creates what all ranks share, and makes the loop call the session for the first batch. What an
    earlier run found (`kept`) is used on the same device with as many ranks.

    Raises:
        MisconfigurationException: If the loader's batch size contradicts `global_batch_size`.
    """

    def __init__(self, fitting: Fitting, kept: dict[str, Any]) -> None:
        self._fitting, self._kept = fitting, kept
        self._trainer = trainer = fitting.loop.trainer
        self._global_batch_size = fitting.options.global_batch_size
        loader_size = loader_batch_size(trainer)
        if self._global_batch_size is not None and loader_size is not None:
            check_global_batch(trainer, self._global_batch_size, loader_size)
        engine = fitting.loop.engine = engine_of(trainer)
        if engine is not None and engine.is_on_disk:
            raise MisconfigurationException(_ON_DISK)
        fitting.consensus.settle()
        self._reducer: Any = None
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            from lightning_memfit.fitting.step.gradient_reducer import GradientReducer

            self._reducer = GradientReducer(fitting.loop.module)
            # DistributedDataParallel would broadcast buffers in the first forward; we do it after each step.
            sum_by_loop(trainer.strategy.model)
        self._step: EffectiveStep | None = None  # before the first batch
        self.first_steps: FirstSteps | None = None
        fitting.loop.guard = StepGuard() if engine is None else _unguarded
        fitting.loop.run_step = self._run_first

    @property
    def size(self) -> int | None:
        """The micro-batch size in use; None before the first batch."""
        return None if self._step is None else self._fitting.sizes.current

    def close(self) -> None:
        """Recompute nothing any more."""
        if self._step is not None:
            self._step.close()

    def kept(self) -> dict[str, Any]:
        """Return what a later run needs to reuse the size: what was found, and on which device."""
        limit_bytes, memory = self._fitting.options.limit_bytes, self._fitting.memory
        device = self._trainer.strategy.root_device
        if limit_bytes is None and memory is not None and not DeviceKind.of(device).has_caching_allocator:
            limit_bytes = memory.limit_bytes
        setting = {"device": hardware_name(device), "world_size": self._trainer.world_size, "limit_bytes": limit_bytes}
        return {"micro_batch_size": self._fitting.sizes.current, **setting}

    # --- the first batch --------------------------------------------------------------------------------------------

    def _run_first(self, request: StepRequest) -> ClosureResult:
        """Choose the size and run the batch; when the search has ended the loop calls the step itself."""
        fitting = self._fitting
        fitting.consensus.settle()
        share_added = getattr(self._trainer.strategy, "share_added", None)
        if self._reducer is not None and share_added is not None:
            share_added()
        fitting.sizes = sizes = MicroBatchSize(fitting.splitter.count(request.batch))
        self._step = EffectiveStep(fitting, self._reducer)
        if self._global_batch_size is not None and loader_batch_size(self._trainer) is None:
            check_global_batch(self._trainer, self._global_batch_size, sizes.local_batch_size)
        size, reason = self._choose(request, self._step)
        # All ranks use the smallest size; their batches may differ.
        size = int(min(theirs for (theirs,) in fitting.consensus.exchange(size, at=At.BATCH)))
        wanted = fitting.options.micro_batch_size
        is_unlimited = wanted == "auto" and fitting.options.limit_bytes is None and fitting.memory is None
        sizes.begin(size, sys.maxsize if is_unlimited else size if wanted == "auto" else max(size, wanted))
        fitting.note(size, reason)
        fitting.loop.run_step = self._step.run if self.first_steps is None else self.first_steps.run
        return fitting.loop.run_step(request)

    def _choose(self, request: StepRequest, step: EffectiveStep) -> tuple[int, str]:
        fitting, local_batch_size, kept = self._fitting, self._fitting.sizes.local_batch_size, self._kept
        wanted, limit_bytes = fitting.options.micro_batch_size, fitting.options.limit_bytes
        if limit_bytes is None and fitting.memory is not None:
            limit_bytes = fitting.memory.limit_bytes
        if fitting.prediction is not None:
            fitting.prediction.begin(request.batch, local_batch_size, fitting.splitter.first)
        if wanted != "auto":
            size = min(wanted, local_batch_size)
            return size, f"MicroBatching: micro-batch {size} of {local_batch_size} samples, as asked for."
        if kept and kept | self.kept() | {"micro_batch_size": kept["micro_batch_size"]} == kept:
            from lightning_memfit.fitting.size.shapes import shape_of
            from lightning_memfit.fitting.step.first_steps import guard_of

            size = min(local_batch_size, int(kept["micro_batch_size"]))
            fitting.shapes = guard_of(fitting, shape_of(request.batch), size, limit_bytes)
            return size, f"MicroBatching: micro-batch {size} of {local_batch_size} samples, as in the checkpoint."
        if limit_bytes is None:
            return local_batch_size, (
                f"MicroBatching: the whole share of {local_batch_size} samples at once; no memory limit is known for "
                f"{self._trainer.strategy.root_device.type}. Add a `MemoryLimit` or set `micro_batch_size`."
            )
        from lightning_memfit.fitting.step.first_steps import FirstSteps  # a size that is given needs no search

        self.first_steps = FirstSteps(fitting, step, limit_bytes)
        return self.first_steps.begin(request)
