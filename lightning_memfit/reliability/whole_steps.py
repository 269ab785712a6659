"""`WholeSteps`: a checkpoint that lacks a part of a window of batches says so; and where callbacks may save."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_memfit.memory.attach import hide_idle_hooks
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.reliability.random_numbers import KeepsRandomNumbers
from lightning_memfit.reliability.rank_watch import watch_ranks


class WholeSteps(KeepsRandomNumbers):
    """Keep in checkpoints what an exact continuation needs, and say which ones lack a part of a step.

    With `accumulate_grad_batches` above 1, gradients of a part of a window are in no checkpoint: a run that goes on
    from one that was saved inside a window steps with the rest of it alone. The first such save of a run is told with
    the batches that it lacks. Saves fall between windows if `val_check_interval` and the like are multiples of
    `accumulate_grad_batches`.

    Checkpoints hold the state of the generators of random numbers, see `KeepsRandomNumbers`.

    `memfit fit` and `MicroBatching` add it by themselves. It may stand anywhere among the callbacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unwrap: Callable[[], None] | None = None
        self._is_told = False
        hide_idle_hooks(self)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put a layer around saving."""
        self.remove()
        others = [callback for callback in trainer.callbacks if isinstance(callback, WholeSteps)]  # type: ignore[attr-defined]
        watch_ranks(trainer.strategy)
        self.follow_random_numbers(trainer, stage)
        if stage == "fit" and (not others or others[0] is self):
            self._is_told = False
            self._unwrap = wrap_method(trainer, "save_checkpoint", partial(self._save, trainer))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the layer off again; after an error it stays until the next run, as callbacks may save then."""
        self.remove()

    def remove(self) -> None:
        """Take the layers off."""
        self.leave_random_numbers()
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

    def _save(self, trainer: Trainer, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
        save(filepath, *args, **kwargs)
        weights_only = args[0] if args else kwargs.get("weights_only")
        if self._is_told or weights_only or not _has_begun(trainer):
            return
        self._is_told = True
        last, size = _ready(trainer), trainer.accumulate_grad_batches
        first = (last - 1) // size * size + 1
        rank_zero_warn(
            f"WholeSteps: {str(filepath)!r} was saved before the optimizer's step of "
            f"{f'batch {first}' if first == last else f'batches {first} to {last}'} (epoch {trainer.current_epoch}) "
            "and lacks their gradients: a run that goes on from it leaves them out. Let `val_check_interval` and the "
            "like be multiples of `accumulate_grad_batches`, or save in `on_train_batch_end` of a window's last batch. "
            "This is said once."
        )


def _ready(trainer: Trainer) -> int:
    """Batches of this epoch that were begun."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def _has_begun(trainer: Trainer) -> bool:
    """Whether a step has begun and isn't done: a batch is being worked on, or the window has more."""
    is_fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
    module: LightningModule | None = trainer.lightning_module
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if not is_fitting or module is None or not module.automatic_optimization or not progress.ready:
        return False
    return bool(progress.processed < progress.ready or trainer.fit_loop._should_accumulate())


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
