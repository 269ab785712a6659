"""The one place that extends Lightning's optimization loop, which is private API. Written for Lightning 2.6.6.

`_AutomaticOptimization` runs `training_step`, `zero_grad` and backward once per loader batch, then the optimizer. This
loop leaves the first three to `run_step`, which calls `forward`, `backward` and `after_backward` to do what Lightning
would.
Counters, hooks, precision plugins, clipping, schedulers and checkpoints stay Lightning's.
`tests/numerics/fitting/test_loop.py` fails when upstream moves.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.reliability.upstream.deepspeed import ZeroEngine

if TYPE_CHECKING:
    from lightning_memfit.fitting.size.device_memory import DeviceMemory
    from lightning_memfit.fitting.size.prediction import SizePrediction
    from lightning_memfit.fitting.size.shapes import ShapeGuard
    from lightning_memfit.fitting.size.sizes import MicroBatchSize
    from lightning_memfit.fitting.step.loss_weights import LossWeights
    from lightning_memfit.fitting.step.split import BatchSplitter
    from lightning_memfit.reliability.consensus import RankConsensus

_BACKWARD_HOOKS = ("on_before_backward", "on_after_backward")
_ZERO_GRAD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")


@dataclass(slots=True)
class StepRequest:
    """One loader batch to run forward and backward on."""

    arguments: "OrderedDict[str, Any]"  # of `training_step` by name, `"batch"` among them
    optimizer: Optimizer
    zero_grad: Callable[[], None] | None  # with all hooks; None within a window of `accumulate_grad_batches`
    is_last: bool  # whether the optimizer steps after it
    kept: Any = None  # what `BatchGuard` keeps of the batch
    is_complete: bool = False  # the optimizer may call its closure again

    @property
    def batch(self) -> Any:
        """The loader batch."""
        return self.arguments["batch"]


class _WholeBatchClosure(Closure):
    """A closure that runs all micro-batches."""

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._step_fn()


_NOTHING: AbstractContextManager[None] = nullcontext()


class MicroBatchLoop(_AutomaticOptimization):
    """Lightning's automatic optimization, with forward and backward of a loader batch done by `run_step`.

    Args:
        trainer: The trainer, whose loop it replaces between `install` and `uninstall`.

    Attributes:
        run_step: Runs forward and backward of one loader batch; must be set before training starts.
        guard: Makes a context around the optimizer step; must be set before training starts.
        begin: Called before the first batch if `run_step` is not set by then: Lightning's tuners run the loop without
            the hooks of callbacks.
        engine: The DeepSpeed engine that accumulates gradients and divides them among ranks; None under strategies that
            leave that to the loop.
        results: Collection that `self.log` writes to in training.
    """

    run_step: Callable[[StepRequest], ClosureResult]
    guard: Callable[[Optimizer], AbstractContextManager[None]]
    begin: Callable[[], None]

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.results: Any = trainer.fit_loop.epoch_loop._results
        self._replaced: _AutomaticOptimization | None = None
        self._overridden: dict[tuple[str, ...], bool] = {}
        self._is_alone = trainer.world_size == 1
        self.engine: ZeroEngine | None = None

    # --- taking Lightning's place -----------------------------------------------------------------------------------

    def install(self) -> None:
        """Replace the Trainer's loop, and take over its counters."""
        epoch_loop = self.trainer.fit_loop.epoch_loop
        self._replaced = epoch_loop.automatic_optimization
        self.optim_progress = self._replaced.optim_progress
        self._skip_backward = self._replaced._skip_backward
        epoch_loop.automatic_optimization = self

    def uninstall(self) -> None:
        """Restore the Trainer's own loop."""
        if self._replaced is not None:
            self._replaced.optim_progress = self.optim_progress
            self.trainer.fit_loop.epoch_loop.automatic_optimization = self._replaced
            self._replaced = None

    @override
    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        if "batch" not in kwargs:
            raise MisconfigurationException(
                "`MicroBatching` needs `training_step(batch, ...)`; a step that takes `dataloader_iter` fetches its "
                "own batches. Take the batch as argument or leave `MicroBatching` out."
            )
        request = StepRequest(
            arguments=kwargs,
            optimizer=optimizer,
            zero_grad=self._make_zero_grad_fn(batch_idx, optimizer),
            is_last=self.trainer.accumulate_grad_batches == 1 or not self.trainer.fit_loop._should_accumulate(),
        )
        if not hasattr(self, "run_step"):
            self.begin()
        # `run_step` is looked up at every call: the first one replaces it, and an optimizer may call again.
        return _WholeBatchClosure(lambda: self.run_step(request))

    @override
    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Tensor | None]) -> None:
        with self.guard(self.trainer.optimizers[0]):
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)

    # --- forward and backward ---------------------------------------------------------------------------------------

    @property
    def module(self) -> LightningModule:
        """The module in training."""
        return self.trainer.lightning_module

    @property
    def num_batches(self) -> int:
        """Number of the loader batch in training within its epoch, counted from 1."""
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the epoch ends with the loader batch in training, as far as this rank's loader and limits tell."""
        return self.trainer.is_last_batch or self.num_batches >= self.trainer.num_training_batches

    def forward(self, request: StepRequest, part: Any, divisor: float) -> ClosureResult:
        """Run `training_step` on a part of the batch and divide its loss."""
        arguments = request.arguments
        if part is not arguments["batch"]:
            arguments = arguments.copy()
            arguments["batch"] = part
        if self._is_alone or self.engine is not None:
            output = call._call_strategy_hook(self.trainer, "training_step", *arguments.values())
        else:
            with self.unsynchronized():  # DistributedDataParallel decides in forward whether backward reduces
                output = call._call_strategy_hook(self.trainer, "training_step", *arguments.values())
        self.trainer.strategy.post_training_step()
        if output is None and not self._is_alone:
            raise RuntimeError(
                "`training_step` returned None, which skips a batch. With several devices that is not possible: return "
                "a loss of zero weight."
            )
        return ClosureResult.from_training_step_output(output, divisor)  # type: ignore[arg-type]

    def backward(self, request: StepRequest, loss: Tensor, announce: bool, is_final: bool = False) -> None:
        """Run backward without synchronising ranks and without calling `on_after_backward`.

        `on_before_backward` is announced for one micro-batch of a batch, so that hooks are called as often as in a run
        without micro-batches. The final one before the optimizer steps an engine that reduces gradients has to know.
        """
        if self._skip_backward:
            return
        has_hooks = self._overrides(_BACKWARD_HOOKS)
        reduces = is_final and self.engine is not None
        if (reduces or (self._is_alone and self.engine is None)) and not has_hooks:
            call._call_strategy_hook(self.trainer, "backward", loss, request.optimizer)
            return
        muted = _BACKWARD_HOOKS[1:] if announce else _BACKWARD_HOOKS
        with _NOTHING if reduces else self.unsynchronized(), self._without_hooks(muted) if has_hooks else _NOTHING:
            call._call_strategy_hook(self.trainer, "backward", loss, request.optimizer)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks, or an engine, communicate in the passes themselves, instead of after those of a batch."""
        is_replicated = isinstance(self.trainer.strategy.model, DistributedDataParallel)
        return self.engine is not None or not (self._is_alone or is_replicated)

    def to_device(self, batch: Any) -> Any:
        """Move a collated batch to the device like a loader's batch, with the user's transfer hooks."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)

    @property
    def runs_backward(self) -> bool:
        """Whether there are backward passes: Lightning leaves them out in an epoch for statistics of batch norms."""
        return not self._skip_backward

    @property
    def has_after_backward(self) -> bool:
        """Whether there is anything to call after backward."""
        return self._overrides(_BACKWARD_HOOKS) and not self._skip_backward

    def after_backward(self) -> None:
        """Call `on_after_backward`, when the gradients of the whole batch are complete."""
        call._call_callback_hooks(self.trainer, "on_after_backward")
        call._call_lightning_module_hook(self.trainer, "on_after_backward")

    def unsynchronized(self) -> AbstractContextManager[None]:
        """Return a context in which backward does not reduce gradients over ranks."""
        if self._is_alone and self.engine is None:
            return _NOTHING
        return _block_parallel_sync_behavior(self.trainer.strategy, block=True)

    # --- hooks ------------------------------------------------------------------------------------------------------

    @property
    def has_zero_grad_hooks(self) -> bool:
        """Whether somebody's own code runs when gradients are cleared."""
        return self._overrides(_ZERO_GRAD_HOOKS)

    @override
    def _on_before_zero_grad(self, optimizer: Optimizer) -> None:
        if self._overrides(_ZERO_GRAD_HOOKS) or not isinstance(self.trainer.profiler, PassThroughProfiler):  # type: ignore[attr-defined]
            super()._on_before_zero_grad(optimizer)
        else:  # without asking every callback for a hook that none has
            self.optim_progress.optimizer.zero_grad.increment_ready()
            self.optim_progress.optimizer.zero_grad.increment_started()

    def _overrides(self, hooks: tuple[str, ...]) -> bool:
        """Whether the module or a callback defines one of these hooks; found out once."""
        known = self._overridden.get(hooks)
        if known is None:
            own = any(is_overridden(hook, self.module) for hook in hooks)
            pairs = [(hook, callback) for hook in hooks for callback in _callbacks(self.trainer)]
            known = own or any(hasattr(Callback, hook) and is_overridden(hook, callback) for hook, callback in pairs)
            self._overridden[hooks] = known
        return known

    @contextmanager
    def _without_hooks(self, names: tuple[str, ...]) -> Iterator[None]:
        owners = [
            owner for owner in (self.module, *_callbacks(self.trainer)) if any(is_overridden(n, owner) for n in names)
        ]
        hidden = [(owner, name, vars(owner).get(name)) for owner in owners for name in names]
        for owner, name, _ in hidden:
            object.__setattr__(owner, name, _do_nothing)
        try:
            yield
        finally:
            for owner, name, own in hidden:
                object.__delattr__(owner, name)
                if own is not None:
                    object.__setattr__(owner, name, own)


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(getattr(trainer, "callbacks", ()))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a hook by nothing."""


@dataclass(frozen=True)
class Options:
    """The arguments of `MicroBatching` that concern training."""

    global_batch_size: int | None
    micro_batch_size: int | Literal["auto"]
    allow_batch_statistics: bool
    recover: bool
    last_resort: Literal["none", "recompute"]
    limit_bytes: int | None


@dataclass
class Fitting:
    """What the parts of one run of `fit` share."""

    loop: MicroBatchLoop
    splitter: "BatchSplitter"
    weights: "LossWeights"
    consensus: "RankConsensus"
    memory: "DeviceMemory | None"  # None if it can't be measured
    options: Options
    prediction: "SizePrediction | None"  # None where no step can be traced
    note: Callable[[int, str], None]  # takes a size that was chosen, and the reason
    sizes: "MicroBatchSize"
    shapes: "ShapeGuard | None" = None  # None where no memory limit is known
