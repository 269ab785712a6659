"""`WholeSteps`: no checkpoint is written, and no run stops, while a window of batches is accumulated."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_memfit.memory.attach import hide_idle_hooks
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.reliability.random_numbers import KeepsRandomNumbers
from lightning_memfit.reliability.rank_watch import watch_ranks

_ON_BATCH, _ON_VALIDATION = "on_train_batch_end", "on_validation_end"


class _LaterError(BaseException):
    """Leaves the hook of a checkpoint callback that would save inside a window."""


class WholeSteps(KeepsRandomNumbers):
    """Move saves and stops that fall into an accumulation window to the window's end.

    With `accumulate_grad_batches` above 1, gradients of a part of a window are in no checkpoint: a run that goes on
    from one steps with the rest of the window alone. Saves of `ModelCheckpoint` and its like wait for the optimizer's
    step, whatever triggers them (time, steps, a validation), and are then what they would have been there; the first
    one that waits is logged. So does a stop (`max_time`, `EarlyStopping`): a window that was begun is finished. After
    a validation inside a window the weights saved are those after the window's step, while the monitored figure, in
    the file's name, too, is of those before it. Saves of weights only aren't moved.

    Checkpoints hold the state of the generators of random numbers, see `KeepsRandomNumbers`.

    A save that something else asks for, or an error, can't wait. It is made, and the first time a warning names the
    batches that it lacks.

    `memfit fit` and `MicroBatching` add it by themselves. It may stand anywhere among the callbacks.

    Attributes:
        moved: Number of saves that waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self._undo: list[Callable[[], None]] = []
        self._held: dict[int, tuple[str, int]] = {}
        self._is_hook = False
        self._stop_after: str | None = None
        self._num_saved = 0
        self._told: set[str] = set()
        hide_idle_hooks(self)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put layers around the checkpoint callbacks, around saving, and around the end of a batch."""
        self.remove()
        others = [callback for callback in trainer.callbacks if isinstance(callback, WholeSteps)]  # type: ignore[attr-defined]
        watch_ranks(trainer.strategy)
        self.follow_random_numbers(trainer, stage)
        if stage != "fit" or (others and others[0] is not self):
            return
        self.moved, self._told = 0, set()
        self._undo.append(wrap_method(trainer, "save_checkpoint", partial(self._save, trainer)))
        self._undo.append(wrap_method(trainer.fit_loop.epoch_loop, "on_advance_end", partial(self._end, trainer)))
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoint) and not getattr(callback, "save_weights_only", False):
                for name in (_ON_BATCH, _ON_VALIDATION):
                    self._undo.append(wrap_method(callback, name, partial(self._hook, callback, name)))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the layers off again; after an error they stay until the next run, as callbacks may save then."""
        self.remove()

    def remove(self) -> None:
        """Take the layers off."""
        self.leave_random_numbers()
        while self._undo:
            self._undo.pop()()
        self._held.clear()
        self._stop_after = None

    # --- saves ------------------------------------------------------------------------------------------------------

    def _hook(
        self,
        callback: Any,
        name: str,
        hook: Callable[..., None],
        trainer: Trainer,
        module: LightningModule,
        *batch: Any,
    ) -> None:
        """Call a hook of a checkpoint callback; inside a window, undo it if it would save."""
        if _is_inside_window(trainer):
            self._try(callback, name, partial(hook, trainer, module, *batch), trainer)
            return
        held, before = self._held.pop(id(callback), None), self._num_saved
        if held is not None and held[0] == _ON_VALIDATION and name == _ON_BATCH:
            loop = trainer.fit_loop.epoch_loop
            fetcher = trainer.fit_loop._data_fetcher
            if fetcher is None or not loop._should_check_val_fx(fetcher):  # else the hook is about to be called anyway
                callback.on_validation_end(trainer, module)
        hook(trainer, module, *batch)
        if held is not None and self._num_saved > before:
            self.moved += 1
            self._tell_once(
                f"WholeSteps: the checkpoint due after batch {held[1]} was saved after batch {_ready(trainer)}, at the "
                "end of its accumulation window, as no checkpoint holds a part of a window's gradients. So are others."
            )

    def _try(self, callback: Any, name: str, hook: Callable[[], None], trainer: Trainer) -> None:
        before = {
            key: value.copy() if isinstance(value, (dict, list)) else value for key, value in vars(callback).items()
        }
        self._is_hook = True
        try:
            hook()
        except _LaterError:
            vars(callback).clear()
            vars(callback).update(before)
            self._held[id(callback)] = (name, _ready(trainer))
        finally:
            self._is_hook = False

    def _save(self, trainer: Trainer, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Save, unless it can wait for the end of a window."""
        is_partial = not (args[0] if args else kwargs.get("weights_only")) and _has_begun(trainer)
        if is_partial and self._is_hook:
            raise _LaterError
        save(filepath, *args, **kwargs)
        self._num_saved += 1
        if is_partial and "warned" not in self._told:
            self._told.add("warned")
            first, last = _batches(trainer)
            which = f"batch {first}" if first == last else f"batches {first} to {last}"
            rank_zero_warn(
                f"WholeSteps: {str(filepath)!r} was saved before the optimizer's step of {which} (epoch "
                f"{trainer.current_epoch}) and lacks their gradients: a run that goes on from it leaves them out. Save "
                "in `on_train_batch_end` of the last batch of an accumulation window, or by `ModelCheckpoint`."
            )

    def _tell_once(self, words: str) -> None:
        if words[:30] not in self._told:
            self._told.add(words[:30])
            rank_zero_info(words)

    # --- stops ------------------------------------------------------------------------------------------------------

    def _end(self, trainer: Trainer, on_advance_end: Callable[[Any], None], fetcher: Any) -> None:
        """Let a stop wait; one that a validation asked for needs no further validation before it."""
        is_inside = _is_inside_window(trainer)
        if is_inside:
            self._hold_stop(trainer, "batch")
        elif self._stop_after == "batch":
            trainer.should_stop, self._stop_after = True, None
        on_advance_end(fetcher)
        if is_inside:
            self._hold_stop(trainer, "validation")
        elif self._stop_after is not None:
            trainer.should_stop, self._stop_after = True, None

    def _hold_stop(self, trainer: Trainer, after: str) -> None:
        if trainer.should_stop:
            trainer.should_stop = False
            self._stop_after = self._stop_after or after
            self._tell_once("WholeSteps: the run stops when its accumulation window is complete.")


def _ready(trainer: Trainer) -> int:
    """Batches of this epoch that were begun."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def _is_in_training(trainer: Trainer) -> bool:
    module = trainer.lightning_module
    is_fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
    return bool(is_fitting and module is not None and module.automatic_optimization and _ready(trainer))


def _is_inside_window(trainer: Trainer) -> bool:
    """Whether the batch that was just done is one of a window, and not its last."""
    return _is_in_training(trainer) and trainer.fit_loop._should_accumulate()


def _has_begun(trainer: Trainer) -> bool:
    """Whether a step has begun and isn't done: a batch is being worked on, or the window has more."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return _is_in_training(trainer) and (progress.processed < progress.ready or trainer.fit_loop._should_accumulate())


def _batches(trainer: Trainer) -> tuple[int, int]:
    """The first and the last of the batches of this epoch, from 1, that belong to the step that has begun."""
    last, size = _ready(trainer), trainer.accumulate_grad_batches
    return (last - 1) // size * size + 1, last


def checkpoint_folder(trainer: Trainer, dirpath: str | Path | None) -> str:
    """A folder or URL that was named, else that of the first `ModelCheckpoint`, else `checkpoints` in the run's."""
    named = (c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath)
    folder = dirpath or next(named, None) or f"{trainer.log_dir or trainer.default_root_dir}/checkpoints"
    return str(folder) if is_remote(folder) else os.path.abspath(folder)


def is_remote(folder: str | Path) -> bool:
    """Whether it is a URL, which stays text: a `Path` has one slash where it has two."""
    return "://" in str(folder)


def check_folder(trainer: Trainer, argument: str, folder: str | Path | None) -> None:
    """Make a folder that is written to late before training, on all ranks together; URLs are not tried.

    Args:
        trainer: The Trainer.
        argument: What names the folder, such as `Preemption(dirpath=...)`.
        folder: The folder; None if none was named.

    Raises:
        MisconfigurationException: If the first rank can't make it or write into it.
    """
    if folder is None or is_remote(folder):
        return
    words = ""
    if trainer.is_global_zero:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".memfit-", dir=folder):
                pass
        except (OSError, ValueError) as error:
            words = f"`{argument.replace('...', repr(str(folder)))}` can't be written: {error}. "
    if words := trainer.strategy.broadcast(words):
        raise MisconfigurationException(f"{words}Name a folder that can be made and written to; nothing was trained.")


def unused_checkpoint(trainer: Trainer, folder: str, name: str) -> str:
    """The path for a checkpoint that replaces none: `NAME.ckpt`, else `NAME-v1.ckpt` and so on, as Lightning counts.

    Runs may share a folder. What another run is writing at this moment (`NAME.ckpt.partial`) is taken, too. The first
    rank chooses, and all ranks, which must call this together, get its choice.

    Args:
        trainer: The Trainer of the run.
        folder: Where the checkpoint would lie, a folder or a URL.
        name: Its name without `.ckpt`.
    """
    exists = get_filesystem(folder).exists if is_remote(folder) else os.path.lexists
    start = f"{folder.rstrip('/')}/{name}"
    chosen, number = f"{start}.ckpt", 0
    while trainer.is_global_zero and any(exists(one) for one in (chosen, f"{chosen}.partial")):
        number += 1
        chosen = f"{start}-v{number}.ckpt"
    return str(trainer.strategy.broadcast(chosen))
