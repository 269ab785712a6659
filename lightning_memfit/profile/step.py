"""Drive a recorded step, by Lightning's own `Trainer.fit` or by a plain loop in the same order.

`run_step` runs either; `kept_random_state` and `parameter_table` are what tracing and measuring need around it.
"""

import contextlib
import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from typing_extensions import override

from lightning_memfit.memory import Category
from lightning_memfit.profile.copying import copied
from lightning_memfit.profile.fake import tensors_in
from lightning_memfit.profile.fingerprint import has_datamodule
from lightning_memfit.profile.hooks import leave_out_hooks
from lightning_memfit.profile.quiet import LIGHTNING, SILENT_TRAINER, loggers_at
from lightning_memfit.profile.record import ParameterInfo
from lightning_memfit.profile.recorder import EventRecorder

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]

AUTOCAST_DTYPES: dict[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE_DTYPES: dict[str, torch.dtype] = {"bf16-true": torch.bfloat16, "16-true": torch.float16}

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
    steps: int = 2,
    datamodule: Any = None,
    with_start_hooks: bool = True,
) -> None:
    """Run two optimizer steps under the recorder, which is closed afterwards.

    Args:
        recorder: Not yet active.
        module: A clone that may be trained: a LightningModule, or with `make_optimizer` a Hugging Face model.
        batch: Fake or real batch, any structure.
        options: Precision, accumulation, clipping.
        callbacks: Technique callbacks; copies of them are applied.
        make_optimizer: Builds the optimizer for a module that is not a LightningModule.
        steps: Optimizer steps; the second is the steady state.
        datamodule: Becomes `trainer.datamodule`; none of its hooks is called.
        with_start_hooks: Whether to call hooks at the start of training that the step doesn't seem to need.

    Raises:
        ValueError: If callbacks are given for a module that is not a LightningModule: nothing would call them.
    """
    if callbacks and make_optimizer is not None:
        names = ", ".join(type(callback).__name__ for callback in callbacks)
        raise ValueError(f"`callbacks` ({names}) need a LightningModule, which `make_optimizer` says this is not.")
    _track_batch(recorder, batch)
    try:
        if make_optimizer is None:
            leave_out_hooks(module, with_start_hooks)
            _run_lightning(recorder, module, batch, options, tuple(map(_unused_copy, callbacks)), steps, datamodule)
        else:
            recorder.track_module(module)
            with recorder:
                _run_loop(recorder, module, batch, make_optimizer, options, steps)
    finally:
        recorder.close()


def _run_loop(
    recorder: EventRecorder,
    module: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    make_optimizer: OptimizerFactory,
    options: StepOptions,
    steps: int,
) -> None:
    """Train a Hugging Face model (called as `module(**batch).loss`) in the order of Lightning's automatic optimization.

    Lightning clears gradients between forward and backward, so the last step's are alive in the next forward.
    """
    optimizer = make_optimizer(module)
    recorder.track_optimizer(optimizer)
    count = options.traced_micro_batches
    autocast_dtype = AUTOCAST_DTYPES.get(options.precision)
    for _ in range(steps):
        for index in range(count):
            recorder.phase("forward")
            autocast = torch.autocast("cpu", autocast_dtype) if autocast_dtype else contextlib.nullcontext()
            with autocast:
                loss = module(**batch).loss
            loss = loss / count
            if index == 0:
                optimizer.zero_grad()
            recorder.phase("backward")
            loss.backward()
        recorder.phase("step")
        if options.gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(module.parameters(), options.gradient_clip_val)
        optimizer.step()
        del loss
    recorder.phase("end")


def _run_lightning(
    recorder: EventRecorder,
    module: Any,
    batch: Any,
    options: StepOptions,
    callbacks: tuple[Any, ...],
    steps: int,
    datamodule: Any,
) -> None:
    """Run the real `Trainer.fit` with the batch repeated."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers.logger import DummyLogger

    count = options.traced_micro_batches
    with _quiet():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            precision=options.precision,
            max_steps=steps,
            accumulate_grad_batches=count,
            gradient_clip_val=options.gradient_clip_val,
            gradient_clip_algorithm=options.gradient_clip_algorithm,
            logger=DummyLogger(),
            callbacks=[has_datamodule(datamodule), *callbacks, _phase_callback(recorder)],
            **SILENT_TRAINER,
        )
        with recorder:
            trainer.fit(module, _Repeated(batch, steps * count))
    recorder.phase("end")


def _unused_copy(callback: Any) -> Any:
    """A copy without the `log` functions that a running trainer binds to its callbacks, and to its module with them."""
    plain = copy.copy(callback)
    for name in ("log", "log_dict"):
        vars(plain).pop(name, None)
    unused = copied(plain)
    unused.in_trace = True
    return unused


class _Repeated:
    """A loader that gives one batch `count` times; not a DataLoader, so Lightning leaves it alone."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch = batch
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * self.count)

    def __len__(self) -> int:
        return self.count


def _phase_callback(recorder: EventRecorder) -> Any:
    import lightning.pytorch as pl

    class Phases(pl.Callback):
        """Tell the recorder where Lightning is."""

        @override
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            recorder.track_module(pl_module)
            for optimizer in trainer.optimizers:
                recorder.track_optimizer(optimizer)
            for scheduler in trainer.lr_scheduler_configs:
                scheduler.strict = False  # the validation metric that it monitors is not computed here

        @override
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            recorder.phase("end")

        @override
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            recorder.phase("forward")

        @override
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            recorder.phase("backward")

        @override
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            recorder.phase("step")

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


# --- the parameter table ----------------------------------------------------------------------------------------------


def parameter_table(module: torch.nn.Module, dtype: torch.dtype | None = None) -> tuple[ParameterInfo, ...]:
    """Every parameter with its stored size; tied ones name the first.

    Args:
        module: Not changed.
        dtype: Count floating parameters as after `module.to(dtype)`.
    """
    first_name: dict[int, str] = {}
    table = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared = first_name.get(id(parameter), "")
        first_name.setdefault(id(parameter), name)
        size = dtype.itemsize if dtype and parameter.is_floating_point() else parameter.element_size()
        shape = tuple(parameter.shape)
        info = ParameterInfo(name, parameter.numel(), size, parameter.requires_grad, len(shape), shared, shape)
        table.append(info)
    return tuple(table)
