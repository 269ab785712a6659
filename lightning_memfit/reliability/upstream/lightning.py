"""Non-public parts of Lightning that a run which is to go on exactly needs, written for Lightning 2.6.

A loop that goes on from a checkpoint knows by counters where it was. From one that is saved after a step that a
validation follows, it goes on behind that validation, so that nobody sees its figures; from one that is saved after an
epoch's last batch, behind the epoch's end.
"""

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Trainer

from lightning_memfit.memory.wrapping import wrap_method


def is_followed(trainer: Trainer) -> bool:
    """Whether validation, or the end of an epoch of several batches, comes after the batch that was just trained.

    A validation that comes after every step doesn't count.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    if bool(loop.batch_progress.is_last_batch) and loop.batch_progress.current.ready > 1:
        return True
    is_everywhere = trainer.val_check_batch is not None and trainer.val_check_batch <= trainer.accumulate_grad_batches
    is_due = fetcher is not None and not loop.val_loop.skip and bool(loop._should_check_val_fx(fetcher))
    return is_due and not is_everywhere


def begins_an_epoch(trainer: Trainer) -> bool:
    """Whether a run that goes on, and has just loaded its counters, begins with the data of a new epoch.

    So it does after an epoch's end, and after `on_train_batch_end` of an epoch's last batch, which Lightning calls a
    restart.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    is_behind_last = progress.is_last_batch and progress.total.completed == progress.total.processed - 1
    return not trainer.fit_loop.restarting or bool(is_behind_last)


def after_batch_hooks(trainer: Trainer, layer: Callable[..., None]) -> Callable[[], None]:
    """Put a layer around what Lightning does once all hooks of a batch are over, those of the module after callbacks'.

    Returns:
        A function that takes the layer off.
    """
    return wrap_method(trainer._logger_connector, "on_batch_end", layer)


def step_plateau_schedulers(trainer: Trainer, interval: Literal["step", "epoch"]) -> None:
    """Let schedulers on a plateau step, if their metrics are known, where Lightning leaves that out.

    Metrics are in no checkpoint. So Lightning steps neither at the end of the epoch in which a run went on (those of a
    validation that was run since are known) nor, in the run that goes on, for the batch after which it was saved.
    """
    if not trainer.lightning_module.automatic_optimization:
        return
    done = 1 + (trainer.fit_loop.epoch_loop.batch_idx if interval == "step" else trainer.current_epoch)
    configs = (one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau and one.interval == interval)
    monitors = {one.monitor for one in configs if not done % one.frequency}
    if not monitors or monitors - trainer.callback_metrics.keys():
        return
    if interval == "epoch":
        trainer.fit_loop._restarting = False  # whereupon Lightning does
    else:
        trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
