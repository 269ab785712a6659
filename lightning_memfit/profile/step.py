"""Drive a recorded step, by Lightning's own `Trainer.fit` or by a plain loop in the same order.

Module and callbacks are trained themselves: this is for a process that is thrown away (`profile.process`).
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_memfit.memory import Category
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.profile.callbacks import START_HOOKS, do_nothing, guard_hooks, is_own
from lightning_memfit.profile.course import Course, TraceLimits
from lightning_memfit.profile.culprit import is_of_this_package
from lightning_memfit.profile.fake import tensors_in
from lightning_memfit.profile.process import RefusedError
from lightning_memfit.profile.quiet import SILENT_TRAINER
from lightning_memfit.profile.ranks import Ranks, without_barriers
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.replaced import replaced

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
    batch_idx: int | None = None
    """Number of the batch that a step is told, for one that does something else then; by default the real ones."""

    @property
    def traced_micro_batches(self) -> int:
        """Micro-batches to trace: two are enough, as the third of a window allocates what the second does."""
        return min(self.accumulate_grad_batches, 2)


@dataclass(frozen=True)
class Workload:
    """What a trace or a measured run trains.

    Raises:
        ValueError: If callbacks or ranks are given for a module that is not a LightningModule: nothing would call them.
    """

    module: torch.nn.Module
    """A LightningModule, or with `make_optimizer` a Hugging Face model."""
    batch: Any
    """One batch as the loader gives it, any structure."""
    options: StepOptions = StepOptions()
    callbacks: tuple[Any, ...] = ()
    """Technique callbacks, and those of the user's that act in a step."""
    make_optimizer: OptimizerFactory | None = None
    """Builds the optimizer for a module that is not a LightningModule."""
    limits: TraceLimits = field(default_factory=TraceLimits)
    ranks: Ranks | None = None
    """Run the step as one of several ranks, whose process group must be there (`process_group_of`)."""

    def __post_init__(self) -> None:
        if self.make_optimizer is None:
            return
        if self.ranks is not None:
            raise ValueError("`ranks` need a LightningModule, which `make_optimizer` says this is not.")
        if self.callbacks:
            names = ", ".join(type(callback).__name__ for callback in self.callbacks)
            raise ValueError(f"`callbacks` ({names}) need a LightningModule, which `make_optimizer` says this is not.")

    @property
    def name(self) -> str:
        """Class of the module."""
        return type(self.module).__name__

    @property
    def epoch_batches(self) -> int:
        """Batches of an epoch of the Trainer that the module belongs to; 0 where that isn't known."""
        trainer = getattr(self.module, "_trainer", None)
        limit: Any = getattr(trainer, "limit_train_batches", None)
        found: Any = getattr(trainer, "num_training_batches", None)
        for batches in (found, limit if isinstance(limit, int) else None):
            if isinstance(batches, (int, float)) and 0 < batches < float("inf"):
                return int(batches)
        return 0


def run_step(recorder: EventRecorder, workload: Workload) -> Course:
    """Run optimizer steps under the recorder until they are known, and close the recorder."""
    options = workload.options
    course = Course(recorder, workload.limits, options.traced_micro_batches)
    for tensor in tensors_in(workload.batch):
        recorder.track(tensor, Category.INPUT, "batch")
    torch.nn.Module.zero_grad(workload.module)  # of a run before; a loop here would keep a weight that is replaced
    is_compiling = "torch._dynamo" in sys.modules  # fakes have nothing to compile for, and a recorder sees operators
    try:
        with torch.compiler.set_stance("force_eager") if is_compiling else contextlib.nullcontext():
            if workload.make_optimizer is None:
                _run_lightning(course, workload)
            else:
                recorder.track_module(workload.module)
                with recorder, recorder.following_resizes(), counted_random_states(recorder):
                    _run_loop(course, workload.module, workload.batch, workload.make_optimizer, options)
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


_LEFT_OUT = (
    *("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
    "prepare_data",  # the batch is given
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
    *("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad"),
)
"""Hooks around training that a step doesn't need."""


def leave_out_hooks(module: Any) -> None:
    """Replace hooks around training by nothing, of a LightningModule that is thrown away."""
    for name in _LEFT_OUT:
        if hasattr(type(module), name):
            object.__setattr__(module, name, do_nothing)


def _go_without(failed: list[BaseException], inner: Any, *arguments: Any, **keywords: Any) -> None:
    """Run a hook at the start of training, without which the steps may run as well.

    It may write files, or ask for what only training has, and need not act in the steps.
    """
    try:
        inner(*arguments, **keywords)
    except (Exception, RefusedError) as error:
        failed.append(error)


def _run_lightning(course: Course, workload: Workload) -> None:
    """Run the real `Trainer.fit` with the batch repeated."""
    import lightning.pytorch as pl
    from lightning.fabric.utilities import registry
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.plugins import Precision as PrecisionPlugin

    recorder, options, ranks = course.recorder, workload.options, workload.ranks
    module: Any = workload.module
    datamodule = attached_datamodule(module)
    for child in module.modules():
        if isinstance(child, pl.LightningModule):
            child._trainer = None
    del child  # which a callback may replace
    leave_out_hooks(module)
    failed: list[BaseException] = []
    for name in START_HOOKS:
        if getattr(type(module), name) is not getattr(pl.LightningModule, name):
            if name == "setup":
                wrap_method(module, name, partial(_before_moving, recorder), innermost=True)
            if not is_of_this_package(type(module)):  # whose hooks say what is wrong
                wrap_method(module, name, partial(_go_without, failed))
    for callback in workload.callbacks:
        for name in ("log", "log_dict"):  # which a running Trainer binds
            vars(callback).pop(name, None)
        callback.in_trace = True
        if not is_own(callback):
            guard_hooks(callback, course.in_callback, course.remarks)
    plugins = [one for one in workload.callbacks if isinstance(one, PrecisionPlugin)]
    given: dict[str, Any] = ranks.trainer_options() if ranks is not None else {"devices": 1}
    of_rank = given.pop("plugins", [])
    # A Trainer asks every installed package for callbacks, whose files take longer to read than a small step to trace.
    with replaced(registry, "entry_points", lambda *_, **__: ()):
        trainer: Any = pl.Trainer(
            accelerator="cpu",
            **given,
            precision=None if plugins else options.precision,
            plugins=[*of_rank, *plugins],
            max_epochs=_MANY_EPOCHS,
            max_steps=_MANY_EPOCHS * course.limits.batches,
            accumulate_grad_batches=options.traced_micro_batches,
            gradient_clip_val=options.gradient_clip_val,
            gradient_clip_algorithm=options.gradient_clip_algorithm,
            logger=DummyLogger(),
            callbacks=[
                *(one for one in workload.callbacks if one not in plugins),
                _phase_callback(course, options),
            ],
            **SILENT_TRAINER,
        )
        if datamodule is not None:  # which a module may ask, and whose hooks would read data
            for name in ("prepare_data", "setup", "teardown", "on_exception"):
                object.__setattr__(datamodule, name, do_nothing)
            trainer.datamodule = datamodule
        with (
            recorder,
            recorder.following_resizes(),
            counted_random_states(recorder),
            without_barriers(),
            _progress_bar_unread(),
        ):
            try:
                trainer.fit(module, _Repeated(workload.batch, course, trainer))
            except (Exception, RefusedError) as error:
                if failed:
                    raise failed[0] from error
                raise
    recorder.phase("end")


_MANY_EPOCHS = 1000


def attached_datamodule(module: Any) -> Any:
    """The data module of the trainer that a module belongs to; None without either."""
    return getattr(getattr(module, "_trainer", None), "datamodule", None)


@contextmanager
def _progress_bar_unread() -> Iterator[None]:
    """Leave what is logged for a progress bar as tensors.

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


class _Repeated:
    """A loader that gives one batch until the steps are known; not a DataLoader, so Lightning leaves it alone.

    A batch ends where the next one is asked for: then all hooks of the module and of callbacks have run. What a step
    writes into an object is not in the next one.
    """

    def __init__(self, batch: Any, course: Course, trainer: Any) -> None:
        self.batch = batch
        self.course = course
        self.trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        self.course.recorder.track_trained(self.trainer.lightning_module)  # a hook may have unfrozen some
        while not self.course.end_batch():
            yield tree_map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copy.copy(leaf), self.batch)
        self.trainer.should_stop = True

    def __len__(self) -> int:
        return self.course.limits.batches + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Repeated":
        return self  # who reads a batch before the run changes nothing


def _with_number(number: int, inner: Any, *arguments: Any, **keywords: Any) -> Any:
    """Pass another number of the batch on, the first positional argument that is an integer."""
    places = [place for place, value in enumerate(arguments) if type(value) is int]
    changed = [number if places[:1] == [place] else value for place, value in enumerate(arguments)]
    return inner(*changed, **keywords)


def _before_moving(recorder: EventRecorder, inner: Any, *arguments: Any, **keywords: Any) -> Any:
    """Run a module's `setup`, which Lightning calls before it moves the module to its device."""
    with recorder.in_host_memory():
        return inner(*arguments, **keywords)


def _count_step(course: Course, inner: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
    """Count a step that a gradient scaler left out, too."""
    before = course.steps_of(optimizer)
    result = inner(optimizer, *arguments, **keywords)
    if course.steps_of(optimizer) == before:
        course.stepped(optimizer)
    return result


def _phase_callback(course: Course, options: StepOptions) -> Any:
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
            course.follow(optimizers, manual=not pl_module.automatic_optimization)
            wrap_method(trainer.strategy, "optimizer_step", partial(_count_step, course))
            if options.batch_idx is not None:
                with_number = partial(_with_number, options.batch_idx)
                wrap_method(trainer.strategy, "training_step", with_number, innermost=True)
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
