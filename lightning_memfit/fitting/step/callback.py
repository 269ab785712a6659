"""`MicroBatching`: the user sets the effective batch, the callback finds the micro-batch that fits the device.

The callback only connects the parts to Lightning's hooks: `MicroBatchLoop` replaces Lightning's optimization loop,
`FitSession` chooses the size on the first batch, `EffectiveStep` runs every batch, and `EvaluationSplitter` runs the
batches of validation, test and prediction.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_memfit.fitting.size.device_memory import find_device_memory, knows_limit
from lightning_memfit.fitting.size.sizes import MicroBatchSize
from lightning_memfit.fitting.step.loop import Fitting, MicroBatchLoop, Options
from lightning_memfit.fitting.step.loss_weights import LossWeight, LossWeights
from lightning_memfit.fitting.step.session import (
    FitSession,
    lend_batch_size,
    loader_batch_size,
    loader_remainder,
    local_batch_size_for,
)
from lightning_memfit.fitting.step.split import BatchSplitter, SplitHook
from lightning_memfit.memory.attach import hide_idle_hooks
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.reliability.consensus import At, RankConsensus
from lightning_memfit.reliability.random_numbers import KeepsRandomNumbers
from lightning_memfit.reliability.rank_watch import RankWatch, watch_ranks
from lightning_memfit.reliability.whole_steps import WholeSteps
from lightning_memfit.techniques.core.facts import run_of
from lightning_memfit.techniques.micro_batching import unsupported

if TYPE_CHECKING:
    from lightning_memfit.fitting.size.prediction import SizePrediction
    from lightning_memfit.fitting.size.search import SizeSearch
    from lightning_memfit.fitting.step.evaluation import EvaluationSplitter


class MicroBatching(KeepsRandomNumbers):
    """Train with an effective batch of any size by splitting it into micro-batches that fit the device.

    The loader delivers each device's part of the effective batch. Gradients, logged values, schedules, checkpoints and
    `global_step` are those of a run with the whole batch at once. Out-of-memory errors lower the micro-batch and
    repeat the effective batch; they don't end the run.

    The contract: `training_step` returns a loss that is a mean over samples, over labels that count, or a sum, or
    `loss_weight` says what it is a mean over. Tensors whose first dimension is the batch are cut, everything else is
    passed whole, or `split_batch` cuts it. Every micro-batch starts from the buffers and attributes that the batch
    started from; afterwards floating values are the mean over samples, anything else is what the last micro-batch
    left. Lists go on. Noise is drawn for each micro-batch. Before the first split, at split steps 2, 4 ... 64 and at
    new kinds of cuts, samples are run together and in parts: a step that doesn't keep the contract is refused before
    weights change.

    Works with automatic optimization on one device and with DDP, where one rank may run out of memory alone. With FSDP2
    (torch 2.13) it recovers while a size or shape is new. With ZeRO and other sharded strategies a size is found, but
    an out-of-memory error ends the run and says with which size to resume. An error on one rank ends all of them.

    Args:
        global_batch_size: Samples per optimizer step over all devices. Checked against the loader's batch size x
            devices x `accumulate_grad_batches`; a `batch_size` attribute of the datamodule or module is set to
            match. None takes what the loader delivers.
        micro_batch_size: `auto`, or a number of samples. `auto` begins with what a trace of the training step says; if
            that can't be traced, the size grows in the first steps.
        allow_batch_statistics: Accept that BatchNorm layers take their statistics over a micro-batch. Everything else
            is compared with them held fixed.
        recover: Whether to recover from out-of-memory errors; False lets such an error end the run.
        last_resort: `recompute` the activations of all repeated blocks when not even one sample fits any more, instead
            of ending the run. It is exact.
        limit_bytes: Memory that may be used, in bytes. By default what the device reports.
        loss_weight: Function from a batch, or a part of it, to the number that its loss is averaged over. By default
            the module's method `loss_weight`, else unmasked label tokens if the batch has integer `labels`, else
            samples.
        split_batch: Function from a batch and a list of sizes to its parts. By default the module's method
            `split_batch`, else everything with the batch size as first dimension is split.
        num_samples: Function from a batch to its number of samples. By default the module's method `num_samples`.

    Attributes:
        micro_batch_size_in_use: The size in use; None before training.
        changes: Steps at which the size was chosen or changed: `(global_step, size, reason)`.
        description: One line that says what was chosen and why.
    """

    def __init__(
        self,
        global_batch_size: int | None = None,
        micro_batch_size: int | Literal["auto"] = "auto",
        allow_batch_statistics: bool = False,
        recover: bool = True,
        last_resort: Literal["none", "recompute"] = "none",
        limit_bytes: int | None = None,
        loss_weight: LossWeight | None = None,
        split_batch: SplitHook | None = None,
        num_samples: Callable[[Any], int] | None = None,
    ) -> None:
        if micro_batch_size != "auto" and not _is_count(micro_batch_size):
            raise ValueError(f'`micro_batch_size={micro_batch_size!r}` must be "auto" or at least 1.')
        if global_batch_size is not None and not _is_count(global_batch_size):
            raise ValueError(f"`global_batch_size={global_batch_size}` must be at least 1.")
        if isinstance(micro_batch_size, int) and micro_batch_size > (global_batch_size or micro_batch_size):
            raise ValueError(
                f"`micro_batch_size={micro_batch_size}` is more than `global_batch_size={global_batch_size}`, the "
                "samples of a whole step. Lower it, or leave it at `auto`."
            )
        if last_resort not in ("none", "recompute"):
            raise ValueError(f"`last_resort={last_resort!r}` is unknown. Choose from none, recompute.")
        super().__init__()
        self.global_batch_size = global_batch_size
        self.options = Options(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            allow_batch_statistics=allow_batch_statistics,
            recover=recover,
            last_resort=last_resort,
            limit_bytes=limit_bytes,
        )
        self._hooks = {"loss_weight": loss_weight, "split_batch": split_batch, "num_samples": num_samples}
        self.changes: list[tuple[int, int, str]] = []
        self.description = ""
        self._kept: dict[str, Any] = {}
        self._evaluation_sizes: dict[str, int] = {}
        self._loop: MicroBatchLoop | None = None
        self._watch: RankWatch | None = None
        self._whole_steps = WholeSteps()
        self._ranks: RankConsensus | None = None
        self._session: FitSession | None = None
        self._evaluation: EvaluationSplitter | None = None
        self._unwrap: list[Callable[[], None]] = []
        self._lent: tuple[Any, int] | None = None
        self._predictor: SizePrediction | None = None
        self.may_trace = True  # to predict sizes; `MemFit` says so where it found that there can be no traces
        hide_idle_hooks(self)

    @property
    def micro_batch_size_in_use(self) -> int | None:
        """The size in use; None before training."""
        return None if self._session is None else self._session.size

    @property
    def found(self) -> "SizeSearch | None":
        """The search for the size, with what it has found so far; None if there is none."""
        steps = None if self._session is None else self._session.first_steps
        return None if steps is None else steps.search

    # --- Lightning's hooks ------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's optimization loop and the strategy's evaluation steps."""
        self._undo(trainer)
        self._watch = watch_ranks(trainer.strategy)
        refuse_batch_size_finder(trainer)
        for name in ("validation_step", "test_step", "predict_step"):
            around = partial(self._evaluate, trainer, pl_module, name)
            self._unwrap.append(wrap_method(trainer.strategy, name, around))
        if stage != "fit":
            return
        _check_support(trainer, pl_module, self.options)
        if self.global_batch_size is not None:
            self._lent = lend_batch_size(trainer, pl_module, local_batch_size_for(trainer, self.global_batch_size))
        self._predictor = None
        if self.may_trace and self._wants_prediction(trainer):
            # Traces are most of this package, and a size that is given needs none.
            from lightning_memfit.fitting.size.prediction import predict_sizes

            self._predictor = predict_sizes(trainer, pl_module)
        self._whole_steps.setup(trainer, pl_module, stage)
        self.follow_random_numbers(trainer, stage)
        self._loop = MicroBatchLoop(trainer)
        self._loop.begin = lambda: self._begin(trainer, pl_module)
        self._loop.install()

    def _evaluate(
        self, trainer: Trainer, module: LightningModule, name: str, step: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._evaluation is None:
            from lightning_memfit.fitting.step.evaluation import EvaluationSplitter  # many runs never evaluate

            ranks = self._agree_by(trainer, is_evaluation=True)
            parts = self._splitter(module), self._weights(module), ranks, self._evaluation_sizes
            self._evaluation = EvaluationSplitter(trainer, *parts)
        return self._evaluation.run(name, step, *args, **kwargs)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the session, which needs the optimizers, the loader and all ranks."""
        self._begin(trainer, pl_module)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._loop is not None
        _refuse_synchronized_norm(trainer, pl_module)  # again: `configure_model` runs after `setup`
        if self._session is not None:  # that of Lightning's learning rate finder, or of an earlier run
            self.state_dict()
            self._session.close()
        fitting = Fitting(
            self._loop,
            self._splitter(pl_module, loader_batch_size(trainer), loader_remainder(trainer)),
            self._weights(pl_module),
            self._agree_by(trainer),
            find_device_memory(trainer),
            self.options,
            self._predictor,
            self._note,
            MicroBatchSize(1),
        )
        self._session = FitSession(fitting, self._kept)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notice if another rank goes on with the epoch: its loader has more batches than it said."""
        if self._ranks is not None:
            self._ranks.exchange(at=At.EPOCH_END)

    def _agree_by(self, trainer: Trainer, is_evaluation: bool = False) -> RankConsensus:
        if isinstance(trainer.strategy, SingleDeviceStrategy):
            return RankConsensus(1)
        if self._ranks is not None and (self._ranks.stops_together or not is_evaluation):
            return self._ranks
        from lightning_memfit.fitting.recovery.lockstep import consensus_for  # for several ranks, or divided weights

        ranks = consensus_for(trainer, is_evaluation)
        if ranks.stops_together or not is_evaluation:
            self._ranks = ranks
        return ranks

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore what was replaced."""
        self._whole_steps.remove()
        self.leave_random_numbers()
        self._undo(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore what was replaced; Lightning calls no `teardown` after an exception."""
        if self._watch is not None:
            self._watch.explain(exception)
        self.leave_random_numbers()
        self._undo(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the size found, with the device and the number of ranks that it is for."""
        if self._session is not None and self._session.size is not None:
            self._kept = self._session.kept()
        return self._kept

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what an earlier run found, for reuse on the same device with as many ranks."""
        self._kept = dict(state_dict)

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def predicts_memory(self) -> bool:
        """Whether this callback predicts memory for the size in use."""
        return self._predictor is not None and not self._predictor.is_divided

    def _wants_prediction(self, trainer: Trainer) -> bool:
        """Whether a prediction can help a search for the size, or tell a `MemoryPrediction` what a given one takes."""
        if any(self._hook(trainer.lightning_module, name) for name in ("split_batch", "num_samples")):
            return False
        if self.options.micro_batch_size != "auto":
            return run_of(trainer, trainer.lightning_module).has("MemoryPrediction")
        return self.options.limit_bytes is not None or knows_limit(trainer)

    def _note(self, size: int, reason: str) -> None:
        assert self._loop is not None
        trainer = self._loop.trainer
        self.changes.append((trainer.global_step, size, reason))
        self.description = reason if reason.startswith("MicroBatching:") else self.description
        if reason.startswith("MicroBatching:"):
            rank_zero_info(reason)
        if self._predictor is not None:
            self._predictor.tell_monitors(trainer, size)
        for logger in trainer.loggers:
            logger.log_metrics({"micro_batch_size": float(size)}, step=trainer.global_step)

    def _splitter(
        self, module: LightningModule, expected: int | None = None, remainder: int | None = None
    ) -> BatchSplitter:
        hooks = self._hook(module, "split_batch"), self._hook(module, "num_samples")
        return BatchSplitter(*hooks, expected, remainder)

    def _weights(self, module: LightningModule) -> LossWeights:
        return LossWeights(self._hook(module, "loss_weight"), module)

    def _hook(self, module: LightningModule, name: str) -> Callable[..., Any] | None:
        return self._hooks[name] or own_method(module, name)

    def _undo(self, trainer: Trainer) -> None:
        if self._session is not None:
            self.state_dict()
            self._session.close()
        if self._predictor is not None:
            self._predictor.close()
        if self._loop is not None:
            self._loop.uninstall()
        while self._unwrap:
            self._unwrap.pop()()
        if self._lent is not None:
            owner, before = self._lent
            owner.batch_size = before
        if self._ranks is not None:
            self._ranks.close()
        self._loop, self._evaluation, self._lent = None, None, None
        self._watch, self._ranks = None, None


def own_method(module: LightningModule, name: str) -> Callable[..., Any] | None:
    """A function that the module's class defines or the module was given; a number of that name is the user's own."""
    if isinstance(vars(module).get(name), (FunctionType, MethodType, partial)):
        return vars(module)[name]  # type: ignore[no-any-return]
    defined = inspect.getattr_static(type(module), name, None)
    return getattr(module, name) if isinstance(defined, (FunctionType, staticmethod, classmethod)) else None


def refuse_batch_size_finder(trainer: Trainer) -> None:
    """Refuse Lightning's search for the largest batch beside `MicroBatching`.

    Raises:
        MisconfigurationException: If the Trainer has a `BatchSizeFinder`, which `Tuner.scale_batch_size` adds.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        raise MisconfigurationException(
            "`BatchSizeFinder` (`Tuner.scale_batch_size`) looks for the batch size at which memory runs out. With "
            "`MicroBatching` that never happens, as it cuts batches to fit. Leave the finder out: set the batch size "
            "that training should have, and `MicroBatching` finds the micro-batch for it."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_strategy(strategy: Strategy, accumulate_grad_batches: int, options: Options) -> None:
    """Refuse what `MicroBatching` can't do under a strategy, with the argument to change."""
    if strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"`{type(strategy).__name__}` counts micro-batches by itself, so that `MicroBatching` can't say where an "
            "effective batch ends. Use `memfit_zero_1`, `_2`, `_3` (`ZeroStrategy`), `memfit_ddp` or `memfit_fsdp2`."
        )
    if not isinstance(strategy, DeepSpeedStrategy):
        return
    if accumulate_grad_batches > 1:
        wanted = options.global_batch_size or "the effective batch"
        raise MisconfigurationException(
            f"`accumulate_grad_batches={accumulate_grad_batches}` beside `MicroBatching` under ZeRO: DeepSpeed "
            "accumulates the micro-batches that are cut from one loader batch. Leave it at 1 and let the loaders of "
            f"all ranks deliver {wanted} together."
        )
    if options.last_resort != "none":
        raise MisconfigurationException(
            f"`last_resort={options.last_resort!r}` repeats a step, which ZeRO can't. Use `ActivationCheckpointing`, "
            "or `memfit_zero_offload` for optimizer states."
        )


def _refuse_synchronized_norm(trainer: Trainer, module: LightningModule) -> None:
    """Refuse a batch norm that communicates, or will as `Trainer(sync_batchnorm=True)` asks for."""
    asked = trainer._accelerator_connector._layer_sync is not None
    kinds = (_BatchNorm,) if asked else (SyncBatchNorm,)
    norm = next((name for name, one in module.named_modules() if isinstance(one, kinds)), None)
    if norm is not None and trainer.world_size > 1:
        raise MisconfigurationException(
            f"`MicroBatching`: `{norm}` takes its statistics over all ranks, which would wait for each other in every "
            "micro-batch: one that runs out of memory, or has fewer of them, would hang the others. Leave out "
            "`sync_batchnorm` (`SyncBatchNorm`), or `MicroBatching`."
        )


def _refuse_schedule(trainer: Trainer, global_batch_size: int) -> None:
    """Refuse one effective batch for a run in which a callback changes it from epoch to epoch."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            raise MisconfigurationException(
                f"`global_batch_size={global_batch_size}` is one number, and `GradientAccumulationScheduler("
                f"scheduling={callback.scheduling})` multiplies the effective batch by another one in some epochs. "
                "Leave one of the two out: `Trainer(accumulate_grad_batches=...)` holds in all epochs."
            )


def _check_support(trainer: Trainer, module: LightningModule, options: Options) -> None:
    reason = unsupported(run_of(trainer, module), {})
    if reason is not None:
        raise MisconfigurationException(f"`MicroBatching`: {reason}")
    if options.global_batch_size is not None:
        _refuse_schedule(trainer, options.global_batch_size)
    strategy = trainer.strategy
    check_strategy(strategy, trainer.accumulate_grad_batches, options)
    _refuse_synchronized_norm(trainer, module)
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        raise MisconfigurationException(
            "`MicroBatching` adds up the gradients of ranks itself, so that `ddp_comm_hook` would not be used. Remove "
            "one of the two."
        )
