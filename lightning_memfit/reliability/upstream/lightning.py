"""Non-public parts of Lightning that a run which is to go on exactly needs, written for Lightning 2.6.

A loop that goes on from a checkpoint knows by counters where it was. A checkpoint that is saved while validation runs
(`on_validation_batch_end`) lets the run go on behind that validation, so that nobody sees its figures; one that is
saved after an epoch's last batch goes on behind the epoch's end. `before_validation` sets the counters so that the
whole validation is run again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_memfit.memory.wrapping import wrap_method


def validation_is_due(trainer: Trainer) -> bool:
    """Whether validation comes after the batch that was just trained."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    return fetcher is not None and not loop.val_loop.skip and bool(loop._should_check_val_fx(fetcher))


def ends_epoch(trainer: Trainer) -> bool:
    """Whether the batch that was just trained is the last of an epoch that has several."""
    loop = trainer.fit_loop.epoch_loop
    return bool(loop.batch_progress.is_last_batch) and loop.batch_progress.current.ready > 1


def begins_an_epoch(trainer: Trainer) -> bool:
    """Whether a run that goes on, and has just loaded its counters, begins with the data of a new epoch.

    So it does after an epoch's end, and after `on_train_batch_end` of an epoch's last batch, which Lightning calls a
    restart.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    is_behind_last = progress.is_last_batch and progress.total.completed == progress.total.processed - 1
    return not trainer.fit_loop.restarting or bool(is_behind_last)


@contextmanager
def before_validation(trainer: Trainer) -> Iterator[None]:
    """Let a checkpoint that is saved inside say that validation has begun, and no batch of it is done."""
    parts: list[Any] = [getattr(trainer.fit_loop.epoch_loop.val_loop.batch_progress, n) for n in ("total", "current")]
    before = [dict(vars(part)) for part in parts]
    for part in parts:  # which `_EvaluationLoop.update_restart_stage` takes for a validation that was broken off
        part.ready, part.started, part.processed, part.completed = 1, 1, 0, 0
    try:
        yield
    finally:
        for part, values in zip(parts, before, strict=True):
            vars(part).update(values)


def after_batch_hooks(trainer: Trainer, layer: Callable[..., None]) -> Callable[[], None]:
    """Put a layer around what Lightning does once all hooks of a batch are over, those of the module after callbacks'.

    Returns:
        A function that takes the layer off.
    """
    return wrap_method(trainer._logger_connector, "on_batch_end", layer)


def repeats_validation(trainer: Trainer) -> bool:
    """Whether a checkpoint that is saved now lets a run validate anew."""
    total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    return bool(total.processed < total.started)


def validation_begins(trainer: Trainer) -> None:
    """Take the batch that `before_validation` claimed out of the counters again."""
    total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    total.ready = total.started = total.processed = total.completed


def step_plateau_schedulers(trainer: Trainer, interval: Literal["step", "epoch"]) -> None:
    """Let schedulers on a plateau step, if their metrics are known, where Lightning leaves that out.

    Metrics are in no checkpoint. So Lightning steps neither at the end of the epoch in which a run went on (those of a
    validation that was run since are known) nor, in the run that goes on, for the batch after which it was saved.
    """
    waiting = _due_plateaus(trainer, interval)
    if not waiting or any(one.monitor not in trainer.callback_metrics for one in waiting):
        return
    if interval == "epoch":
        trainer.fit_loop._restarting = False  # whereupon Lightning does
    else:
        trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def a_plateau_waits_for_a_step(trainer: Trainer) -> bool:
    """Whether a scheduler on a plateau steps after this validation by what the batch before it has logged.

    That is in no checkpoint, so that a run that validates anew couldn't step it.
    """
    waiting = {one.monitor for one in _due_plateaus(trainer, "step")}
    return bool(waiting and waiting & trainer.fit_loop.epoch_loop._results.metrics(True)["callback"].keys())


def _due_plateaus(trainer: Trainer, interval: Literal["step", "epoch"]) -> list[LRSchedulerConfig]:
    """Schedulers on a plateau that step now, by `_TrainingEpochLoop._update_learning_rates`."""
    if not trainer.lightning_module.automatic_optimization:
        return []
    done = 1 + (trainer.fit_loop.epoch_loop.batch_idx if interval == "step" else trainer.current_epoch)
    configs = (one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau and one.interval == interval)
    return [one for one in configs if not done % one.frequency]
