"""The one place that extends Lightning's optimization loop, which is private API. Written for Lightning 2.6.6.

`_AutomaticOptimization` runs `training_step`, `zero_grad` and backward once per loader batch, then the optimizer. This
loop leaves the first three to `run_step`, which calls `forward`, `backward` and `after_backward` to do what Lightning
would.
Counters, hooks, precision plugins, clipping, schedulers and checkpoints stay Lightning's.
`tests/numerics/fitting/test_loop.py` fails when upstream moves.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_memfit.fitting.recovery.retry import WITH_SEVERAL_DEVICES, retry
from lightning_memfit.fitting.step.gradient_hooks import refusing_early_changes
from lightning_memfit.fitting.upstream.torch import num_writes
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.reliability.upstream.deepspeed import ZeroEngine

REMEDY_FOR_HOOKS = "Let hooks and clipping use less memory, or leave more of it free: `MicroBatching(limit_bytes=...)`."
_OWN_BACKWARD = (
    "`{}.backward` does more than `loss.backward()`, and the batch is split: it would run once per micro-batch, on "
    "gradients that are not those of the batch yet. Do the rest in `on_after_backward` or `on_before_optimizer_step`, "
    "which are called when they are complete, or keep the whole share in one micro-batch."
)
_BACKWARD_HOOKS = ("on_before_backward", "on_after_backward")
_CLIPPING_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")
_STEP_HOOKS = ("on_after_backward", *_CLIPPING_HOOKS)
_ZERO_GRAD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")


@dataclass(slots=True)
class StepRequest:
    """One loader batch to run forward and backward on.

    Attributes:
        arguments: Arguments of `training_step` by name, `"batch"` among them.
        optimizer: The optimizer.
        batch_idx: Index of the loader batch in the epoch.
        zero_grad: Clears the gradients with all hooks; None within a window of `accumulate_grad_batches`.
        is_last: Whether the optimizer steps after it.
        kept: What `BatchGuard` keeps of the batch.
        is_complete: Whether it has been run; the optimizer may call its closure again.
    """

    arguments: "OrderedDict[str, Any]"
    optimizer: Optimizer
    batch_idx: int
    zero_grad: Callable[[], None] | None
    is_last: bool
    kept: Any = None
    is_complete: bool = False

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
        go_back: Returns to the start of the effective batch that `run_step` has run, so that its next call repeats it;
            None if it can't.
        recover: Whether what runs out of memory between backward and the optimizer's step is repeated.
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
        self._overrides_backward: bool | None = None
        self._is_alone = trainer.world_size == 1
        self.engine: ZeroEngine | None = None
        self.go_back: Callable[[], None] | None = None
        self.recover = True
        self._closure: Callable[[], Any] | None = None
        self._guarded_plugin: Any = None
        self._unwrap_plugin: Callable[[], None] | None = None

    # --- taking Lightning's place -----------------------------------------------------------------------------------

    def install(self) -> None:
        """Replace the Trainer's loop, and take over its counters."""
        epoch_loop = self.trainer.fit_loop.epoch_loop
        self._replaced = epoch_loop.automatic_optimization
        self.optim_progress = self._replaced.optim_progress
        self._skip_backward = self._replaced._skip_backward
        epoch_loop.automatic_optimization = self
        self._guarded_plugin = self.trainer.strategy.precision_plugin

    def uninstall(self) -> None:
        """Restore the Trainer's own loop."""
        if self._replaced is not None:
            if self._unwrap_plugin is not None:
                self._unwrap_plugin()
                self._unwrap_plugin = None
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
            batch_idx=batch_idx,
            zero_grad=self._make_zero_grad_fn(batch_idx, optimizer),
            is_last=self.trainer.accumulate_grad_batches == 1 or not self.trainer.fit_loop._should_accumulate(),
        )
        if not hasattr(self, "run_step"):
            self.begin()
        # `run_step` is looked up at every call: the first one replaces it, and an optimizer may call again.
        return _WholeBatchClosure(lambda: self.run_step(request))

    @override
    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Tensor | None]) -> None:
        self._closure = train_step_and_backward_closure
        if self._unwrap_plugin is None and self.recover and self._changes_gradients():
            self._unwrap_plugin = wrap_method(self._guarded_plugin, "_after_closure", self._after_closure)
        try:
            with self.guard(self.trainer.optimizers[0]):
                super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        finally:
            self._closure = None

    def _after_closure(self, after_closure: Callable[..., None], model: LightningModule, optimizer: Optimizer) -> None:
        """Call `on_before_optimizer_step` and clip gradients, in the precision plugin's place.

        If memory runs out, gradients may be changed by half. So forward and backward of the effective batch are run
        again before the hooks are. What hooks log counts once they have succeeded.
        """
        closure = self._closure
        if closure is None:
            after_closure(model, optimizer)
            return
        scaler = getattr(self._guarded_plugin, "scaler", None)
        hook = model._current_fx_name

        def undo() -> None:
            model._current_fx_name = hook  # Lightning doesn't reset it when a hook raises
            if self.go_back is not None:
                self.go_back()  # which the closure notices

        def run_again() -> None:
            closure()
            if scaler is not None and scaler._per_optimizer_states.pop(id(optimizer), None) is not None:
                scaler.unscale_(optimizer)

        retry(
            partial(self._held_logs, partial(after_closure, model, optimizer)),
            lambda: f"`{model._current_fx_name}`",
            REMEDY_FOR_HOOKS,
            undo,
            run_again,
            self._obstacle(),
        )

    def _obstacle(self) -> Callable[[], str | None]:
        """Return a function that says why what runs now can't be repeated after an error; it returns None if it can."""
        before = self._weights_version()

        def obstacle() -> str | None:
            if self.go_back is None:
                return WITH_SEVERAL_DEVICES
            if self._weights_version() != before:
                return "Hooks had changed weights, which only `optimizer.step` may if the batch is to be repeated."
            return None

        return obstacle

    def _weights_version(self) -> int:
        return num_writes(self.module) if self._overrides(_STEP_HOOKS) else 0

    @contextmanager
    def logged_already(self) -> Iterator[None]:
        """Let `self.log` keep what this batch has logged, which the first batch of an epoch would begin anew."""
        self.results.reset = _do_nothing
        try:
            yield
        finally:
            del self.results.reset

    def _held_logs(self, hooks: Callable[[], None], is_repeated: bool = False) -> None:
        """Call hooks, and log what they log when all have succeeded; not at all if it is logged already."""
        held: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        results = self.results
        results.log = lambda *args, **kwargs: held.append((args, kwargs))
        try:
            with self.logged_already() if is_repeated else _NOTHING:
                hooks()
        finally:
            del results.log
        if not is_repeated:
            for args, kwargs in held:
                results.log(*args, **kwargs)

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

    def backward_of_part(self, request: StepRequest, loss: Tensor, announce: bool, is_final: bool = False) -> None:
        """Run backward of one micro-batch of several, as `backward` does.

        Raises:
            MisconfigurationException: If the module's own `backward` does more than calling `loss.backward`, or a hook
                for accumulated gradients changes what is no whole batch's yet.
        """
        if self._overrides_backward is None:
            self._overrides_backward = is_overridden("backward", self.module)
        with ExitStack() as stack:
            stack.enter_context(refusing_early_changes(self.module, self._trained()))
            if self._overrides_backward and not self._skip_backward:
                stack.callback(wrap_method(self.module, "backward", self._only_backward, innermost=True))
            self.backward(request, loss, announce, is_final)

    def _trained(self) -> Iterator[Tensor]:
        """Weights of the module and of its optimizers, which step others while FSDP2 has gathered the module's."""
        yield from self.module.parameters()
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _only_backward(self, backward: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call the module's own `backward`, and refuse it if it does anything with tensors but `loss.backward`."""
        with _TorchCalls() as calls:
            backward(loss, *args, **kwargs)
        if calls.others or calls.roots != [id(loss)]:
            raise MisconfigurationException(_OWN_BACKWARD.format(type(self.module).__name__))

    def backward(self, request: StepRequest, loss: Tensor, announce: bool, is_final: bool = False) -> None:
        """Run backward without synchronising ranks and without calling `on_after_backward`.

        Args:
            request: The step.
            loss: A scalar with a graph.
            announce: Whether to call `on_before_backward`: for one micro-batch of a batch, so that hooks are called as
                often as in a run without micro-batches.
            is_final: Whether it is the last one before the optimizer steps, which an engine that reduces gradients
                itself has to know.
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

    def after_backward(self, run_again: Callable[[], object], is_repeated: bool = False) -> None:
        """Call `on_after_backward`, when the gradients of the whole batch are complete.

        Args:
            run_again: Goes back to the start of the effective batch and runs forward and backward again, if memory
                runs out in the hook, which may have changed gradients by half.
            is_repeated: Whether what the hook logs is logged already.
        """

        def hooks() -> None:
            call._call_callback_hooks(self.trainer, "on_after_backward")
            call._call_lightning_module_hook(self.trainer, "on_after_backward")

        if not self.recover:
            hooks()
            return
        retry(
            lambda: self._held_logs(hooks, is_repeated),
            "`on_after_backward`",
            REMEDY_FOR_HOOKS,
            prepare=run_again,
            obstacle=self._obstacle(),
        )

    def unsynchronized(self) -> AbstractContextManager[None]:
        """Return a context in which backward does not reduce gradients over ranks."""
        if self._is_alone and self.engine is None:
            return _NOTHING
        return _block_parallel_sync_behavior(self.trainer.strategy, block=True)

    # --- hooks ------------------------------------------------------------------------------------------------------

    def _changes_gradients(self) -> bool:
        """Whether anything happens between backward and the optimizer's step."""
        return self._overrides(_CLIPPING_HOOKS) or bool(self.trainer.gradient_clip_val)

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


class _TorchCalls(TorchFunctionMode):
    """Notes calls of `Tensor.backward` and whether torch is called otherwise; what backward itself runs stays unseen.

    Attributes:
        roots: Identities of the tensors whose `backward` was called.
        others: Number of other calls: operations, or reading `Tensor.grad`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.roots: list[int] = []
        self.others = 0

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self.roots.append(id(args[0]))
        else:
            self.others += 1
        return func(*args, **(kwargs or {}))


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(getattr(trainer, "callbacks", ()))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a hook by nothing."""
