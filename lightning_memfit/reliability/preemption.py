"""`Preemption`: a run that a signal ends leaves a checkpoint of its last step, and its exit code names the signal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_memfit.memory.attach import hide_idle_hooks
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.reliability.consensus import RankConsensus
from lightning_memfit.reliability.random_numbers import KeepsRandomNumbers
from lightning_memfit.reliability.rank_watch import watch_ranks
from lightning_memfit.reliability.upstream.lightning import (
    a_plateau_waits_for_a_step,
    after_batch_hooks,
    before_validation,
    ends_epoch,
    step_plateau_schedulers,
    validation_begins,
    validation_is_due,
)
from lightning_memfit.reliability.whole_steps import check_folder, checkpoint_folder, unused_checkpoint

SIGNALS = tuple(name for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if name in signal.Signals.__members__)
"""Those of them that this system has."""

_HANGUP, _USER = getattr(signal, "SIGHUP", None), getattr(signal, "SIGUSR1", None)
"""None on systems without them (Windows)."""


class PreemptedError(KeyboardInterrupt):
    """A signal ended the run. As Ctrl-C does, it passes handlers of errors, those of traces and trial steps included.

    Args:
        number: The signal.
        words: What was saved, or why nothing was.
    """

    def __init__(self, number: int, words: str) -> None:
        super().__init__(f"{signal.Signals(number).name}: {words}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """The code by which shells know a program that a signal ended: SIGTERM 143, SIGINT 130, SIGHUP 129."""
        return 128 + self.number


class Preemption(KeepsRandomNumbers):
    """End a run that gets a signal at its next step boundary, with a checkpoint from which it goes on exactly.

    A step boundary is the end of an optimizer step that neither validation nor the end of an epoch follows, and the
    start of a validation; the run that goes on validates anew, so that whatever looks at its figures sees them. Where a
    scheduler on a plateau steps after the validation by what the batch before it has logged, the run ends after the
    next step. One rank that gets a signal ends all together. What the signal meets (forward, backward, the optimizer, a
    save, a validation that has begun) is finished first. Before the first step there is nothing to save, and the run
    ends at once. A second signal, and the end of the grace time, end it without a checkpoint; once the checkpoint is
    being saved, the grace time counts no longer. Processes that load data go on meanwhile, except after a SIGTERM that
    they get themselves.

    In a run that goes on within an epoch, by whichever checkpoint, schedulers on a plateau step at that epoch's end as
    they would have; Lightning alone leaves that step out. Means over an epoch (`self.log(..., on_epoch=True)`) are
    those of the batches since.

    Lightning then ends as after Ctrl-C, with `SystemExit`; `memfit` exits with 128 plus the signal's number. After
    SIGHUP, the terminal's end, what is printed to it goes nowhere. SIGHUP and SIGINT that the process ignores from its
    start (`nohup`, `&` in a script) stay ignored.

    Under SLURM with automatic requeueing, Lightning's own `hpc_ckpt_N.ckpt` is written, and the job requeued, at the
    step boundary after the requeue signal, on all ranks together, where Lightning would save in the middle of a step;
    the run then goes on until SLURM ends it. SIGTERM is left to Lightning there.

    Put it last among the callbacks: those after it don't see the end of a run that got its signal in its last step.

    Args:
        grace_seconds: How long a signal may wait for a step boundary; it has to cover a validation.
        dirpath: Folder or URL of the checkpoint; a folder is tried before training. Null: that of the first
            `ModelCheckpoint`, else `checkpoints` in the run's.
        signals: Names of the signals.

    Attributes:
        error: What ended the last run; None if no signal did.

    Raises:
        ValueError: If the time is not positive, or a signal is unknown.
    """

    def __init__(
        self,
        grace_seconds: float = 30.0,
        dirpath: str | None = None,
        signals: Iterable[str] = SIGNALS,
    ) -> None:
        if not grace_seconds > 0:
            raise ValueError(f"`grace_seconds={grace_seconds}` must be positive.")
        for name in signals:
            if name not in signal.Signals.__members__:
                raise ValueError(f"`signals`: {name!r} is unknown here. Write for example SIGTERM.")
        super().__init__()
        self.grace_seconds = grace_seconds
        self.dirpath = dirpath
        self.signals = [signal.Signals[name] for name in signals]
        self.error: PreemptedError | None = None
        self._received: int | None = None
        self._is_over = False
        self._is_active = False
        self._process = os.getpid()
        self._consensus: RankConsensus | None = None
        self._has_stepped = False
        self._is_boundary = False
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._requeue: Callable[[], Any] | None = None
        self._is_requeued = False
        self._terminals: list[int] = []
        hide_idle_hooks(self)

    # --- signals ----------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the signals."""
        self._restore()
        self._before = {}
        self.error, self._received, self._is_over, self._has_stepped = None, None, False, False
        self._is_boundary = False
        self._requeue, self._is_requeued = None, False
        self._install(trainer)
        watch_ranks(trainer.strategy)
        self.follow_random_numbers(trainer, stage)
        if stage == "fit":
            loop = trainer.fit_loop.epoch_loop.val_loop
            self._layers.append(wrap_method(loop, "reset", partial(self._begin_to_validate, trainer)))
            self._layers.append(after_batch_hooks(trainer, partial(self._end_batch, trainer)))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that a checkpoint can be written, while it is not needed yet."""
        check_folder(trainer, "Preemption(dirpath=...)", self.dirpath)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals again: Lightning 2.6 takes SIGTERM after `setup`, and waits for other ranks inside it."""
        self._install(trainer)
        if trainer.world_size > 1 and self._consensus is None:
            self._consensus = RankConsensus(trainer.world_size)

    def _install(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python gives signals to the main thread alone
        is_requeued, requeue = _is_requeued(trainer), _requeue_signal(trainer)
        for number in self.signals:
            handler = signal.getsignal(number)
            is_unwanted = handler == signal.SIG_IGN and number in (signal.SIGINT, _HANGUP)
            is_slurms = is_requeued and number in (signal.SIGTERM, _USER, requeue)
            if handler != self._handle and not is_unwanted and not is_slurms:
                self._before.setdefault(number, handler)
                signal.signal(number, self._handle)
        handler = None if requeue is None else signal.getsignal(requeue)
        is_lightnings = callable(handler) and handler not in (self._handle_requeue, self._handle)
        if requeue is not None and is_requeued and callable(handler) and is_lightnings:
            self._before[requeue] = handler  # Lightning's, which is there from the start of training
            self._requeue = partial(handler, requeue, None)
            signal.signal(requeue, self._handle_requeue)
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self._is_active = True
        self._process = os.getpid()

    def _handle_requeue(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process and self._is_active:
            self._is_requeued = True
            rank_zero_info(f"{signal.Signals(number).name}: a checkpoint is saved at the end of this step.")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker of a loader, which the run needs until its step is done
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if not self._is_active:  # Lightning has put back what it found when it started
            signal.signal(number, self._before.get(number) or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == _HANGUP:
            self._leave_terminals()
        if self._is_over or self._received is not None or not self._has_stepped:
            why = "no step was done yet" if not self._has_stepped else "no step boundary came in time"
            if self._received is not None and not self._is_over and self._has_stepped:
                why = "it came twice"
            raise self._ends(self._received or number, f"the run ends without a new checkpoint, as {why}.")
        self._received = number
        name = signal.Signals(number).name
        rank_zero_info(f"{name}: a checkpoint is saved at the end of this step, and the run ends; again to end it now.")
        self._timer = threading.Timer(self.grace_seconds, self._end_grace, (number,))
        self._timer.daemon = True
        self._timer.start()

    def _leave_terminals(self) -> None:
        """Print to nowhere what would be printed to a terminal that is gone, as that is an error."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)

    def _end_grace(self, number: int) -> None:
        if self._timer is None:  # taken back meanwhile, as the checkpoint is being saved
            return
        self._is_over = True
        os.kill(os.getpid(), number)

    def _ends(self, number: int, words: str) -> PreemptedError:
        self._restore()
        self.error = PreemptedError(number, words)
        rank_zero_warn(str(self.error))
        return self.error

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _restore(self) -> None:
        self._stop_timer()
        for number, handler in self._before.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
        self._is_active = False

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._restore()
        self.leave_random_numbers()
        if self._consensus is not None:
            self._consensus.close()
            self._consensus = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the signals back; Lightning calls no `teardown` after an exception."""
        self._restore()
        self.leave_random_numbers()

    # --- step boundaries --------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notice the end of an optimizer step, at which a run can end when the module's own hook is over, too."""
        self._has_stepped = True
        is_done = not trainer.fit_loop._should_accumulate()
        self._is_boundary = is_done and not validation_is_due(trainer) and not ends_epoch(trainer)

    def _end_batch(self, trainer: Trainer, inner: Callable[[], None]) -> None:
        """End the run after an optimizer step, if a rank has got a signal."""
        is_boundary, self._is_boundary = self._is_boundary, False
        if is_boundary:
            # In a run that goes on they don't step for this batch any more.
            self._end_if_told(trainer, prepare=partial(step_plateau_schedulers, trainer, "step"))
        inner()

    def _begin_to_validate(self, trainer: Trainer, reset: Callable[[], None]) -> None:
        """End the run before a validation, which is after a step, and before hooks that may exchange weights for it."""
        reset()
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        validation_begins(trainer)
        is_boundary = self._has_stepped and not trainer.fit_loop._should_accumulate()
        if is_boundary and not a_plateau_waits_for_a_step(trainer):
            with before_validation(trainer):
                self._end_if_told(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let schedulers step that Lightning forgets in a run that goes on."""
        if trainer.fit_loop.restarting:
            step_plateau_schedulers(trainer, "epoch")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run as told, if the signal came after its last step."""
        self._end_if_told(trainer)

    def _end_if_told(self, trainer: Trainer, prepare: Callable[[], None] = lambda: None) -> None:
        told, is_requeued = self._received is not None, self._is_requeued
        if self._consensus is not None:
            told, is_requeued = self._consensus.any_of([told, is_requeued])
        if is_requeued and self._requeue is not None:
            self._is_requeued = False
            self._requeue()
        if not told:
            return
        self._stop_timer()
        prepare()
        folder = checkpoint_folder(trainer, self.dirpath)
        path = unused_checkpoint(trainer, folder, f"preempted-step={trainer.global_step}")
        trainer.save_checkpoint(path)
        raise self._ends(self._received or signal.SIGTERM, f"saved {path}. Go on with `--ckpt_path {path}`.")


def _requeue_signal(trainer: Trainer) -> signal.Signals | None:
    environment = trainer._accelerator_connector.cluster_environment
    number = getattr(environment, "requeue_signal", None) or _USER
    return None if number is None else signal.Signals(number)


def _is_requeued(trainer: Trainer) -> bool:
    """Whether Lightning saves and requeues a job of SLURM by itself."""
    environment = trainer._accelerator_connector.cluster_environment  # a strategy for one device has none
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue
