"""Recover from out-of-memory errors outside forward, backward and the optimizer's step.

`retry` repeats one action from a known state, or ends in a `MemoryExhausted` that says where memory ran out, what was
tried and what helps. `TrainerGuard` does so for what Lightning's loops do between steps: moving batches to the device,
LR schedulers, saving checkpoints. Where nobody can tell what an error left half done (hooks of the user between steps),
it is not repeated, and `explain_where` says so.
"""

import os
import traceback
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_memfit.fitting.recovery.drawn import BatchContents, stored
from lightning_memfit.fitting.recovery.rollback import RandomState
from lightning_memfit.fitting.upstream.torch import forget_pass
from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.memory.state import restore_dict
from lightning_memfit.memory.wrapping import wrap_method

T = TypeVar("T")

NUM_REPEATS = 2
_SAVING = "saving a checkpoint"
_SAVE_LESS = (
    "A checkpoint is made in host memory: leave more of it free, or save less with "
    "`ModelCheckpoint(save_weights_only=True)`."
)
_CHANGED_BATCH = (
    "The hook had changed tensors of the batch in place, so that it can't be repeated: write "
    "`batch = batch * 2` in place of `batch.mul_(2)`."
)
WITH_SEVERAL_DEVICES = "With several devices it is not repeated, as all of them would have to do so together."


def _no_obstacle() -> str | None:
    return None


class MemoryExhausted(torch.OutOfMemoryError):
    """Memory ran out, and everything that can be tried has been; nobody should try again."""


def retry(
    action: Callable[[], T],
    place: str | Callable[[], str],
    remedy: str,
    undo: Callable[[], None] = lambda: None,
    prepare: Callable[[], object] = lambda: None,
    obstacle: Callable[[], str | None] = _no_obstacle,
    repeats: int = NUM_REPEATS,
    failure: Exception | None = None,
) -> T:
    """Call a function, and call it again after an out-of-memory error.

    Args:
        action: The function.
        place: Where it runs, for messages; a function is asked after an error.
        remedy: What the user can do if nothing helps.
        undo: Puts back what `action` may have changed; called after every out-of-memory error, the last included.
        prepare: Called before every repetition, with memory released.
        obstacle: Asked after an error, before `undo`; returns why the action can't be repeated, else None.
        repeats: How often to call it again.
        failure: What the first call has ended in, if the caller has made it already.

    Raises:
        MemoryExhausted: If memory runs out each time, or there is an obstacle.
    """
    failures = 0
    while True:
        if failure is None:
            try:
                return action()
            except Exception as error:
                failure = error
        if isinstance(failure, MemoryExhausted) or not is_out_of_memory(failure):
            raise failure
        failures += 1
        where = place if isinstance(place, str) else place()
        message = str(failure).split("\n")[0]
        hindrance = obstacle()
        release(failure)
        undo()
        if hindrance is not None:
            raise MemoryExhausted(f"Memory ran out in {where}. {hindrance} {remedy} {message}") from failure
        if failures > repeats:
            raise MemoryExhausted(
                f"Memory ran out in {where} {failures} times in a row, although cached memory was released before "
                f"each repetition. Weights and optimizer states are those before it. {remedy} {message}"
            ) from failure
        rank_zero_warn(f"Memory ran out in {where}; it is repeated with cached memory released. {message}")
        failure = None
        prepare()


def explain_where(error: BaseException, num_devices: int) -> None:
    """Add to an out-of-memory error that nothing could recover from where it happened, and what helps.

    Args:
        error: What ended the run; other errors, and those that explain themselves, stay as they are.
        num_devices: Number of devices of the run.
    """
    if not is_out_of_memory(error) or any(isinstance(one, MemoryExhausted) for one in error_chain(error)):
        return
    hook = _hook_in(error)
    where = f"`{hook}`" if hook else "Lightning's loop, outside of hooks"
    what = (
        "repeats forward, backward, clipping, optimizer and scheduler steps, transfers and checkpoints, but not this, "
        "as nobody can tell what it had changed"
        if num_devices == 1
        else "repeats forward, backward and optimizer steps, but not this, which all devices would have to do together"
    )
    text = (
        f"Memory ran out in {where}. `MicroBatching` {what}. Let it use less memory (`.cpu()`, smaller pieces, "
        "`torch.no_grad()`) or leave more: `MicroBatching(limit_bytes=...)`."
    )
    if isinstance(error, OSError):  # which prints this, not its arguments
        error.strerror = f"{error.strerror}\n{text}"
    error.args = (f"{error}\n{text}", *error.args[1:])


def _hook_in(error: BaseException) -> str | None:
    """Name of the innermost hook that Lightning was calling; None if it was calling none."""
    names = [
        frame.f_locals.get("hook_name")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name.startswith("_call_")
    ]
    return next((name for name in reversed(names) if isinstance(name, str)), None)


class TrainerGuard:
    """Repeats what a Trainer does between steps if memory runs out in it.

    Args:
        trainer: The trainer.
        module: Its module.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Guard transfers and checkpoints.

        What `Trainer.save_checkpoint` calls is wrapped instead of itself: with one attribute more, CPython looks up all
        others of the Trainer more slowly, by 3 microseconds in a training step.
        """
        strategy, connector = self._trainer.strategy, self._trainer._checkpoint_connector
        self._undo = [
            wrap_method(strategy, "batch_to_device", self._transfer),
            wrap_method(strategy, "save_checkpoint", self._save),
            wrap_method(connector, "dump_checkpoint", self._collect),
        ]

    def guard_schedulers(self) -> None:
        """Guard schedulers, once they are there, and only if there are any: Lightning asks for them twice in a step."""
        if self._trainer.lr_scheduler_configs:
            epoch_loop = self._trainer.fit_loop.epoch_loop
            self._undo.append(wrap_method(epoch_loop, "_update_learning_rates", self._step_schedulers))

    def uninstall(self) -> None:
        """Guard them no more."""
        while self._undo:
            self._undo.pop()()

    def _retry(
        self,
        action: Callable[[], T],
        place: str | Callable[[], str],
        remedy: str,
        undo: Callable[[], None] | None = None,
        obstacle: Callable[[], str | None] = _no_obstacle,
        repeats: int = NUM_REPEATS,
    ) -> T:
        hook = self._module._current_fx_name
        try:
            return action()
        except Exception as error:
            failure = error
        return self._again(failure, hook, action, place, remedy, undo, obstacle, repeats)

    def _again(
        self,
        failure: Exception,
        hook: str | None,
        action: Callable[[], T],
        place: str | Callable[[], str],
        remedy: str,
        undo: Callable[[], None] | None,
        obstacle: Callable[[], str | None],
        repeats: int,
    ) -> T:
        """Go on after a first call that has failed while Lightning ran a hook of this name."""

        def undo_all() -> None:
            self._module._current_fx_name = hook  # Lightning doesn't reset it when a hook raises
            if self._trainer.world_size == 1:
                forget_pass(self._module)  # that of a hook: its own forward under FSDP2
            if undo is not None:
                undo()

        def hindrance() -> str | None:
            return WITH_SEVERAL_DEVICES if self._trainer.world_size > 1 else obstacle()

        return retry(action, place, remedy, undo_all, obstacle=hindrance, repeats=repeats, failure=failure)

    # --- batches ----------------------------------------------------------------------------------------------------

    def _transfer(self, transfer: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        undo, obstacle = self._way_back(batch) if self._has_own_transfer else (None, _no_obstacle)
        hook = self._module._current_fx_name
        try:  # without what only a second call needs, as this runs in every step
            return transfer(batch, *args, **kwargs)
        except Exception as error:
            failure = error
        return self._again(
            failure,
            hook,
            partial(transfer, batch, *args, **kwargs),
            "the transfer of a batch to the device (`transfer_batch_to_device`, `on_after_batch_transfer`)",
            "The whole batch of the loader waits on the device: give the loader a smaller `batch_size` and the Trainer "
            "a larger `accumulate_grad_batches`.",
            undo,
            obstacle,
            NUM_REPEATS,
        )

    def _way_back(self, batch: Any) -> tuple[Callable[[], None], Callable[[], str | None]]:
        """Return what undoes a transfer by the user's hooks, and what says why that is not possible."""
        contents, random = BatchContents(batch), RandomState(self._trainer.strategy.root_device)

        def undo() -> None:
            contents.restore()
            random.restore()

        return undo, lambda: None if contents.is_unchanged else _CHANGED_BATCH

    @cached_property
    def _has_own_transfer(self) -> bool:
        owners = (self._module, self._trainer.datamodule)  # type: ignore[attr-defined]
        return any(
            is_overridden(name, owner)
            for owner in owners
            if owner is not None
            for name in ("transfer_batch_to_device", "on_after_batch_transfer")
        )

    # --- schedulers -------------------------------------------------------------------------------------------------

    def _step_schedulers(
        self, step: Callable[..., None], interval: str, update_plateau_schedulers: bool, **kwargs: Any
    ) -> None:
        configs = self._trainer.lr_scheduler_configs
        action = partial(step, interval=interval, update_plateau_schedulers=update_plateau_schedulers, **kwargs)
        if all(config.interval != interval for config in configs):
            return action()
        schedules = _Schedules([config.scheduler for config in configs], self._trainer.optimizers)
        progress = self._trainer.fit_loop.epoch_loop.scheduler_progress
        counts = [dict(vars(counter)) for counter in (progress.total, progress.current)]

        def undo() -> None:
            schedules.restore()
            for counter, values in zip((progress.total, progress.current), counts, strict=True):
                vars(counter).update(values)

        return self._retry(action, "the step of an LR scheduler", "Let the scheduler compute on the CPU.", undo)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _collect(self, dump: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Collect a checkpoint, with what hooks add to it."""
        return self._retry(partial(dump, *args, **kwargs), _SAVING, _SAVE_LESS, repeats=1)

    def _save(
        self, save: Callable[..., None], checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Write a checkpoint."""
        existed = os.path.exists(filepath)

        def undo() -> None:
            if not existed and os.path.exists(filepath):  # a `CheckpointIO` that does not write atomically
                self._trainer.strategy.remove_checkpoint(filepath)

        self._retry(partial(save, checkpoint, filepath, *args, **kwargs), _SAVING, _SAVE_LESS, undo, repeats=1)


# --- what a scheduler may change ------------------------------------------------------------------------------------


class _Schedules:
    """State of LR schedulers, nested ones included, and the options of optimizers that they set.

    Args:
        schedulers: The schedulers.
        optimizers: Their optimizers.
    """

    def __init__(self, schedulers: list[Any], optimizers: list[Optimizer]) -> None:
        self._saved: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
        seen: set[int] = set()
        for scheduler in schedulers:
            self._save_object(scheduler, seen)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self._save(group, leave_out="params")

    def restore(self) -> None:
        """Put everything back."""
        for target, values, contents in self._saved:
            restore_dict(target, values, keep=frozenset({"params"}))
            for value, content in contents:
                if isinstance(value, Tensor):
                    value.detach().copy_(content)
                elif isinstance(value, list):
                    value[:] = content
                else:
                    restore_dict(value, content)

    def _save_object(self, owner: Any, seen: set[int]) -> None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        attributes = stored(owner)
        if attributes is None:
            return
        self._save(attributes)
        for value in attributes.values():
            for item in value if isinstance(value, (list, tuple)) else ():
                if isinstance(item, LRScheduler) or (callable(item) and stored(item)):
                    self._save_object(item, seen)  # of a `SequentialLR`; a `LambdaLR`'s callable with state

    def _save(self, target: dict[str, Any], leave_out: str = "") -> None:
        values = {key: value for key, value in target.items() if key != leave_out}
        contents: list[tuple[Any, Any]] = [
            (value, value.detach().clone() if isinstance(value, Tensor) else value.copy())
            for value in values.values()
            if isinstance(value, (Tensor, list, dict))
        ]
        self._saved.append((target, values, contents))
