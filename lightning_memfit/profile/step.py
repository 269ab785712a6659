"""Drive a recorded step, by Lightning's own `Trainer.fit` or by a plain loop in the same order.

`run_step` runs either; `kept_random_state` is what tracing and measuring need around it.
"""

import contextlib
import copy
import functools
import logging
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from typing_extensions import override

from lightning_memfit.memory import Category
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.profile.budget import Budget, LimitReached, TraceLimits
from lightning_memfit.profile.callbacks import CallbackError, is_own, leave_out_other_hooks, runs_at_epoch_start
from lightning_memfit.profile.copying import copied
from lightning_memfit.profile.course import Course, RunLength
from lightning_memfit.profile.culprit import is_asked_by_user
from lightning_memfit.profile.fake import tensors_in
from lightning_memfit.profile.fingerprint import has_datamodule
from lightning_memfit.profile.hooks import StartHooks, begins_epochs, leave_out_hooks
from lightning_memfit.profile.quiet import LIGHTNING, SILENT_TRAINER, loggers_at
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.replaced import replaced
from lightning_memfit.profile.seal import RefusedError, current_seal
from lightning_memfit.profile.upstream.distributed import without_barriers
from lightning_memfit.profile.watched import Counters, Place, TensorAccess

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"]

AUTOCAST_DTYPES: dict[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE_DTYPES: dict[str, torch.dtype] = {
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "64-true": torch.float64,
}

OptimizerFactory = Callable[[torch.nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepOptions:
    """Settings that, with the module and the batch, decide how one optimizer step runs."""

    precision: Precision = "32-true"
    """Lightning's precision name."""
    accumulate_grad_batches: int = 1
    """Micro-batches per optimizer step."""
    gradient_clip_val: float | None = None
    """Clip gradients by this norm or value."""
    gradient_clip_algorithm: str | None = None
    """`norm` or `value`."""

    @property
    def traced_micro_batches(self) -> int:
        """Micro-batches to trace: two are enough, as the third of a window allocates what the second does."""
        return min(self.accumulate_grad_batches, 2)


def run_step(
    recorder: EventRecorder,
    module: torch.nn.Module,
    batch: Any,
    options: StepOptions,
    callbacks: tuple[Any, ...] = (),
    make_optimizer: OptimizerFactory | None = None,
    datamodule: Any = None,
    start_hooks: StartHooks = "all",
    budget: Budget | None = None,
    length: RunLength | None = None,
    others: tuple[Any, ...] = (),
    ranks: Ranks | None = None,
    outside: Callable[[], Iterable[Place]] | None = None,
    tensors: TensorAccess | None = None,
) -> Course:
    """Run optimizer steps under the recorder until they are known, and close the recorder.

    Args:
        recorder: Not yet active.
        module: A clone that may be trained: a LightningModule, or with `make_optimizer` a Hugging Face model.
        batch: Fake or real batch, any structure.
        options: Precision, accumulation, clipping.
        callbacks: Technique callbacks; copies of them are applied.
        make_optimizer: Builds the optimizer for a module that is not a LightningModule.
        datamodule: Becomes `trainer.datamodule`; none of its hooks is called.
        start_hooks: Which of the module's hooks at the start of training to call.
        budget: Where the run ends at the latest.
        length: Length of the real run, as far as it is known.
        others: Copies of the user's callbacks (`unused_copy`), to be thrown away.
        ranks: Run the step as one of several ranks, whose process group must be there (`process_group_of`).
        outside: Gives numbers that lie outside of the module and the callbacks and that a step may change.
        tensors: Access to one-element tensors, which may be counters.

    Raises:
        LimitReached: If a limit was reached before every optimizer's second step.
        CallbackError: If one of the others can't run.
        ValueError: If callbacks are given for a module that is not a LightningModule: nothing would call them.
    """
    if ranks is not None and make_optimizer is not None:
        raise ValueError("`ranks` need a LightningModule, which `make_optimizer` says this is not.")
    if callbacks and make_optimizer is not None:
        names = ", ".join(type(callback).__name__ for callback in callbacks)
        raise ValueError(f"`callbacks` ({names}) need a LightningModule, which `make_optimizer` says this is not.")
    counters = Counters((module, *others), outside, tensors)
    draws = None if tensors is None else tensors.draws
    course = Course(recorder, budget or Budget(TraceLimits()), options.traced_micro_batches, length, counters, draws)
    _track_batch(recorder, batch)
    try:
        if make_optimizer is None:
            course.note_left_out(leave_out_hooks(module, start_hooks))
            for other in others:
                leave_out_other_hooks(other, course.in_callback, partial(course.number, "batch"))
            copies = (*(unused_copy(callback, copied) for callback in callbacks), *others)
            _run_lightning(course, module, batch, options, copies, datamodule, ranks, others)
        else:
            recorder.track_module(module)
            with recorder, recorder.following_resizes(), counted_random_states(recorder), _going_on():
                _run_loop(course, module, batch, make_optimizer, options)
        course.conclude()
    except (Exception, LimitReached, RefusedError, CallbackError) as error:
        if not course.is_extra:
            raise
        cause = error.__cause__ if isinstance(error, CallbackError) and error.__cause__ is not None else error
        seal = current_seal()
        if seal is not None:
            seal.forget(cause)
        course.leave_last_batch(cause)
    finally:
        try:
            course.end()
        finally:
            recorder.close()
    return course


def _run_loop(
    course: Course,
    module: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    make_optimizer: OptimizerFactory,
    options: StepOptions,
) -> None:
    """Train a Hugging Face model (called as `module(**batch).loss`) in the order of Lightning's automatic optimization.

    Lightning clears gradients between forward and backward, so the last step's are alive in the next forward.
    """
    recorder = course.recorder
    optimizer = make_optimizer(module)
    recorder.track_optimizer(optimizer)
    course.follow([optimizer], manual=False)
    count = options.traced_micro_batches
    autocast_dtype = AUTOCAST_DTYPES.get(options.precision)
    index, is_known = 0, False
    while not is_known:
        course.begin_batch()
        recorder.phase("forward")
        autocast = torch.autocast("cpu", autocast_dtype) if autocast_dtype else contextlib.nullcontext()
        with autocast:
            loss = module(**batch).loss
        loss = loss / count
        if index == 0:
            optimizer.zero_grad()
        recorder.phase("backward")
        loss.backward()
        index = (index + 1) % count
        if index == 0:
            recorder.phase("step")
            if options.gradient_clip_val:
                torch.nn.utils.clip_grad_norm_(module.parameters(), options.gradient_clip_val)
            optimizer.step()
            del loss
        is_known = course.end_batch()
    recorder.phase("end")


def _run_lightning(
    course: Course,
    module: Any,
    batch: Any,
    options: StepOptions,
    callbacks: tuple[Any, ...],
    datamodule: Any,
    ranks: Ranks | None,
    others: tuple[Any, ...],
) -> None:
    """Run the real `Trainer.fit` with the batch repeated."""
    from lightning.fabric.utilities import registry
    from lightning.pytorch.loggers.logger import DummyLogger

    recorder, length = course.recorder, course.length
    # A Trainer asks every installed package for callbacks, whose files take longer to read than a small step to trace.
    with _quiet(), replaced(registry, "entry_points", _remembering(registry.entry_points)):
        trainer = _watched_trainer(course)(
            accelerator="cpu",
            **(ranks.trainer_options() if ranks is not None else {"devices": 1}),
            precision=options.precision,
            max_epochs=length.epochs or _MANY_EPOCHS,
            max_steps=max(length.steps or 0, _MANY_EPOCHS * course.limits.batches),
            accumulate_grad_batches=options.traced_micro_batches,
            gradient_clip_val=options.gradient_clip_val,
            gradient_clip_algorithm=options.gradient_clip_algorithm,
            logger=DummyLogger(),
            callbacks=[has_datamodule(datamodule), *callbacks, _phase_callback(course, others)],
            **SILENT_TRAINER,
        )
        # Lightning's handlers would note a SIGTERM in this Trainer, and the process would go on.
        trainer._signal_connector.register_signal_handlers = lambda: None
        with (
            recorder,
            recorder.following_resizes(),
            counted_random_states(recorder),
            _going_on(),
            without_barriers(),
            _progress_bar_unread(),
            _watched_loops(course, trainer.fit_loop),
        ):
            trainer.fit(module, _Repeated(batch, course, trainer))
    recorder.phase("end")


@functools.cache
def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that asks another for each answer once."""
    return functools.cache(function)


_MANY_EPOCHS = 1000


class EndedError(RuntimeError):
    """A step ends the program.

    Args:
        code: What it would return.
    """

    def __init__(self, code: Any) -> None:
        super().__init__(f"it ends the program with {code!r}")


@contextmanager
def _going_on() -> Iterator[None]:
    """Raise an error instead where a step ends the program."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # which Lightning's Trainer ends the program for
            raise error.__context__ from None
        raise EndedError(error.code) from error


def _watched_trainer(course: Course) -> Any:
    """A class of Trainers that know which numbers of the run the user's code asks for."""
    import lightning.pytorch as pl
    from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars

    class WatchedTrainer(pl.Trainer):
        @property
        @override
        def global_step(self) -> int:
            value = super().global_step
            return course.number("step", value) if course.in_hook or is_asked_by_user() else value

        @property
        @override
        def current_epoch(self) -> int:
            value = super().current_epoch
            return course.number("epoch", value) if course.in_hook or is_asked_by_user() else value

        @property
        @override
        def num_training_batches(self) -> int | float:
            known = course.length.batches
            return super().num_training_batches if known is None or not is_asked_by_user() else known

        @property
        @override
        def is_last_batch(self) -> bool:
            return course.is_last_batch() if is_asked_by_user() else super().is_last_batch

        @property
        @override
        def progress_bar_metrics(self) -> dict[str, float]:
            values = super().progress_bar_metrics
            values.update(convert_tensors_to_scalars(values))
            return values

    return WatchedTrainer


@contextmanager
def _watched_loops(course: Course, loop: Any) -> Iterator[None]:
    """Watch the numbers of Lightning's loops that the user's code reads, as those of its Trainer.

    Args:
        course: Says what they shall be.
        loop: The Trainer's loop over epochs.
    """
    from lightning.pytorch.loops import progress
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress
    trackers: dict[int, str] = {id(batches.current): "batch", id(batches.total): "total"}
    trackers |= {id(epochs.current): "epoch", id(epochs.total): "epoch"}
    numbers = {
        "batch": lambda: vars(batches.current)["ready"] - 1,
        "total": lambda: vars(batches.total)["ready"] - 1,
        "epoch": lambda: vars(epochs.current)["processed"],
    }

    def watched(kind: type, attribute: str, name: str) -> AbstractContextManager[None]:
        read: Any = vars(kind)[attribute].fget

        def numbered(owner: Any) -> int:
            value: int = read(owner)
            return course.number(name, value) if is_asked_by_user() else value

        return replaced(kind, attribute, property(numbered))

    def counted(kind: type, attribute: str) -> AbstractContextManager[None]:
        def read(tracker: Any) -> int:
            value, name = vars(tracker)[attribute], trackers.get(id(tracker))
            if name is None or not is_asked_by_user():
                return int(value)
            number = numbers[name]()
            seen: int = course.number(name, number) + (value - number)
            return seen

        def write(tracker: Any, value: int) -> None:
            vars(tracker)[attribute] = value

        return replaced(kind, attribute, property(read, write))

    with contextlib.ExitStack() as stack:
        for kind in (_FitLoop, _TrainingEpochLoop):
            stack.enter_context(watched(kind, "total_batch_idx", "total"))
            stack.enter_context(watched(kind, "batch_idx", "batch"))
        stack.enter_context(watched(_TrainingEpochLoop, "global_step", "step"))
        for tracker in (progress._ReadyCompletedTracker, progress._StartedTracker, progress._ProcessedTracker):
            for attribute in tracker.__annotations__:
                stack.enter_context(counted(tracker, attribute))
        yield


@contextmanager
def _progress_bar_unread() -> Iterator[None]:
    """Leave what is logged for a progress bar as tensors until somebody asks the Trainer for it.

    Lightning reads these values after every batch, whether or not there is a bar. Where they are unknown, a value had
    to be assumed, and the whole step to be traced with several, for nothing that the step does.
    """
    from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
    from lightning.pytorch.trainer.connectors.logger_connector import result

    def unread(value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.numel() == 1
        return value if is_number else convert_tensors_to_scalars(value)  # which refuses what is no number

    with replaced(result, "convert_tensors_to_scalars", unread):
        yield


def unused_copy(callback: Any, copy_all: Callable[[Any], Any]) -> Any:
    """A copy without the `log` functions that a running trainer binds to its callbacks, and to its module with them.

    Args:
        callback: A callback of a run.
        copy_all: Copies it with all that it holds.
    """
    plain = copy.copy(callback)
    for name in ("log", "log_dict"):
        vars(plain).pop(name, None)
    unused = copy_all(plain)
    unused.in_trace = True
    return unused


def copied_others(
    callbacks: tuple[Any, ...], module: Any, clone: Any, copy_all: Callable[..., Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Techniques among callbacks, and copies of the others, which refer to a clone where they refer to its module.

    Args:
        callbacks: Any callbacks.
        module: The user's module.
        clone: Its copy that is run.
        copy_all: Called with a callback and `known`, what stands in the copy for objects by their `id`.

    Raises:
        CallbackError: If a callback can't be copied.
    """
    trainer = getattr(module, "_trainer", None)
    known: dict[int, Any] = {id(module): clone}
    if trainer is not None:
        known[id(trainer)] = None
        original = getattr(trainer, "lightning_module", None)
        if original is not None:  # the module may be a copy of the Trainer's
            known[id(original)] = clone
    others = []
    for callback in callbacks:
        if is_own(callback):
            continue
        try:
            others.append(unused_copy(callback, lambda plain: copy_all(plain, known=known)))
        except Exception as error:
            raise CallbackError(callback, error) from error
    return tuple(filter(is_own, callbacks)), tuple(others)


class _Repeated:
    """A loader that gives one batch until the steps are known; not a DataLoader, so Lightning leaves it alone.

    Where the course begins another epoch, this one ends.

    A batch ends where the next one is asked for: then all hooks of the module and of callbacks have run.
    """

    def __init__(self, batch: Any, course: Course, trainer: Any) -> None:
        self.batch = batch
        self.course = course
        self.trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        self.course.recorder.track_trained(self.trainer.lightning_module)  # a hook may have unfrozen some
        while not self.course.end_batch():
            if self.course.begins_epoch:
                self.course.begins_epoch = False
                return
            yield self.batch
        self.trainer.should_stop = True

    def __len__(self) -> int:
        return self.course.limits.batches + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Repeated":
        return self  # who reads a batch before the run changes nothing


_NUMBERED_HOOKS = ("on_train_batch_start", "on_train_batch_end")


def _with_number(course: Course, inner: Any, *arguments: Any, **keywords: Any) -> Any:
    """Pass on the number of the batch, the first positional argument that is an integer, as the course says."""
    places = [place for place, value in enumerate(arguments) if type(value) is int]
    if not places:
        return inner(*arguments, **keywords)
    changed = list(arguments)
    changed[places[0]] = course.number("batch", changed[places[0]])
    return inner(*changed, **keywords)


def _count_step(course: Course, inner: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
    """Count a step that a gradient scaler left out, too."""
    before = course.steps_of(optimizer)
    result = inner(optimizer, *arguments, **keywords)
    if course.steps_of(optimizer) == before:
        course.stepped(optimizer)
    return result


def _phase_callback(course: Course, others: tuple[Any, ...]) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import _MockOptimizer

    recorder = course.recorder

    class Phases(pl.Callback):
        """Tell the recorder where Lightning is."""

        @override
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            recorder.track_module(pl_module)
            # One that steps nothing is Lightning's own, where a module gives none and has a way of its own to step.
            optimizers = [one for one in trainer.optimizers if not isinstance(one, _MockOptimizer)]
            for optimizer in optimizers:
                recorder.track_optimizer(optimizer)
            epoch_hooks = begins_epochs(pl_module) or any(map(runs_at_epoch_start, others))
            manual, schedulers = not pl_module.automatic_optimization, trainer.lr_scheduler_configs
            course.follow(optimizers, manual, epoch_hooks, schedulers)
            with_number = partial(_with_number, course)
            wrap_method(trainer.strategy, "training_step", with_number, innermost=True)
            wrap_method(trainer.strategy, "optimizer_step", partial(_count_step, course))
            for name in _NUMBERED_HOOKS:
                if getattr(type(pl_module), name, None) is not getattr(pl.LightningModule, name):
                    wrap_method(pl_module, name, with_number, innermost=True)
            for scheduler in trainer.lr_scheduler_configs:
                scheduler.strict = False  # the validation metric that it monitors is not computed here

        @override
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            recorder.phase("end")

        @override
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            course.begin_batch()
            recorder.phase("forward")

        @override
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            recorder.phase("backward")

        @override
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            recorder.phase("step")
            recorder.track_divided()

    return Phases()


def _track_batch(recorder: EventRecorder, batch: Any) -> None:
    """Enter the tensors of the batch as input."""
    for tensor in tensors_in(batch):
        recorder.track(tensor, Category.INPUT, "batch")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the traced trainer's banners and advice out of the user's terminal."""
    with loggers_at(logging.ERROR, *LIGHTNING), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- random state -----------------------------------------------------------------------------------------------------


@contextmanager
def counted_random_states(recorder: EventRecorder) -> Iterator[None]:
    """Enter states of the CPU's generator that the step keeps, as checkpoints do: they are made past the dispatcher."""
    original = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = original()
        recorder.track(state, Category.ACTIVATION, "state of the random numbers")
        return state

    if recorder.kernels is None:  # on another device they lie in host memory
        yield
        return
    with replaced(torch, "get_rng_state", get_rng_state), replaced(torch.random, "get_rng_state", get_rng_state):
        yield


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the CPU generators of torch, NumPy and Python: a profile must not change the run that follows it."""
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002  (the global generator, which user code may draw from)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)
