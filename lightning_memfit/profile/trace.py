"""Trace one steady optimizer step of a module on fake tensors: no GPU, no memory, the module untouched."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.memory import MemoryBreakdown
from lightning_memfit.profile.assumptions import UNKNOWN_VALUES, WAY_OUT, TraceError, over_assumptions
from lightning_memfit.profile.datamodule import attached_datamodule
from lightning_memfit.profile.dispatch import AttentionBackend, CudaDispatch, cuda_autocast_lists
from lightning_memfit.profile.events import AlignmentError, EventList
from lightning_memfit.profile.fake import (
    copyable_fakes,
    fake_clone,
    fake_pretrained_weights,
    real_quantization_maps,
    transformers_not_tracing,
)
from lightning_memfit.profile.fold import fold_blocks, plan_fold
from lightning_memfit.profile.foreach import foreach_defaults
from lightning_memfit.profile.garbage import collector_paused
from lightning_memfit.profile.integers import AssumedValues, RealIntegers
from lightning_memfit.profile.parameters import parameter_table
from lightning_memfit.profile.quiet import loggers_at
from lightning_memfit.profile.random_state import kept_random_state
from lightning_memfit.profile.reading import readable_fakes
from lightning_memfit.profile.record import ParameterInfo
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.recurrent import OneDnnWorkspaces, UnknownKernelError, refuse_fused_recurrence
from lightning_memfit.profile.repeat import unroll
from lightning_memfit.profile.step import (
    AUTOCAST_DTYPES,
    TRUE_DTYPES,
    OptimizerFactory,
    StepOptions,
    run_step,
)


@dataclass(frozen=True)
class Emulation:
    """The device whose operators a trace issues."""

    device: Literal["cuda", "cpu"] = "cuda"
    """`cpu` leaves torch's CPU dispatch as it is."""
    capability: tuple[int, int] = (8, 0)
    """CUDA compute capability; decides the attention kernel."""
    attention: AttentionBackend | None = None
    """Force an attention kernel."""


@dataclass(frozen=True)
class Trace:
    """What a traced run of two optimizer steps allocated and computed."""

    events: EventList
    num_blocks: int = 0
    block_class: str = ""
    traced_blocks: int = 0
    assumptions: tuple[str, ...] = ()
    """Values the trace had to assume; empty means the figures rest on nothing but the real batch."""
    assumed: AssumedValues = field(default_factory=AssumedValues)
    """With which values this trace was made."""
    attention_kernels: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    """FLOPs by phase of the steady step (one micro-batch), whole module."""
    block_flops: dict[str, int] = field(default_factory=dict)
    """FLOPs by phase of one repeated block."""
    operators: dict[str, int] = field(default_factory=dict)
    """Operators by phase of the same micro-batch that compute something, views left out."""
    traffic: dict[str, int] = field(default_factory=dict)
    """Bytes by phase that operators other than matrix products read and write."""
    parameters: tuple[ParameterInfo, ...] = ()
    optimizer: str = ""
    """Class names of the optimizers."""
    host: MemoryBreakdown = field(default_factory=MemoryBreakdown)
    """Host memory that the run keeps."""


_NEGLIGIBLE_BYTES = 4096
"""Gradient clipping joins the norms of all parameters, four bytes each."""


def trace_step(
    module: torch.nn.Module,
    batch: Any,
    options: StepOptions,
    emulation: Emulation | None = None,
    callbacks: tuple[Any, ...] = (),
    make_optimizer: OptimizerFactory | None = None,
    shorten: bool = True,
    check_assumptions: bool = True,
) -> Trace:
    """Trace two optimizer steps (the second is the steady state) of a LightningModule or a Hugging Face model.

    Args:
        module: LightningModule (run by the real `Trainer.fit`), or with `make_optimizer` a Hugging Face model.
            Its tensors may be real or meta. It is copied, never changed.
        batch: A real batch as the loader gives it; its integers steer control flow.
        options: Precision, accumulation, clipping.
        emulation: Device to stand for; CUDA compute capability 8.0 by default.
        callbacks: Technique callbacks to copy and apply to the clone.
        make_optimizer: Builds the optimizer for a module that is not a LightningModule.
        shorten: Trace five repeated blocks and unroll where they are proved alike; False traces every block.
        check_assumptions: Trace with several values where one has to be assumed. False is for variants of a step that
            has been traced with them.

    Raises:
        TraceError: If the step can't be traced.
    """
    emulation = emulation or Emulation()

    def trace(shorten: bool) -> Trace:
        return over_assumptions(
            type(module).__name__,
            lambda assumed: _trace(module, batch, options, emulation, callbacks, make_optimizer, shorten, assumed),
            check_assumptions,
        )

    if shorten and not any(getattr(callback, "depends_on_depth", False) for callback in callbacks):
        # Whatever goes wrong with fewer blocks says nothing about the module; the whole of it decides.
        with contextlib.suppress(AlignmentError, TraceError):
            return trace(True)
    return trace(False)


def _trace(
    module: torch.nn.Module,
    batch: Any,
    options: StepOptions,
    emulation: Emulation,
    callbacks: tuple[Any, ...],
    make_optimizer: OptimizerFactory | None,
    shorten: bool,
    assumed: AssumedValues,
) -> Trace:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    integers = RealIntegers(fake_mode, assumed)
    with kept_random_state(), collector_paused(), _explained(module, integers):
        true_dtype = TRUE_DTYPES.get(options.precision)
        builds_itself = make_optimizer is None and _builds_itself(module)
        # Copying costs time by the module: what will not be traced is not copied, where it is known before.
        plan = None if builds_itself else plan_fold(module, shorten)
        clone = fake_clone(module, fake_mode, true_dtype, left_out=plan.modules_left_out(module) if plan else ())
        with contextlib.ExitStack() as stack:
            dispatch = _enter_modes(stack, fake_mode, integers, emulation, options)
            if builds_itself:
                with _default_dtype(true_dtype):
                    clone.configure_model()  # type: ignore[operator]
            table = parameter_table(clone) if builds_itself else parameter_table(module, true_dtype)
            fold = plan.apply(clone) if plan else fold_blocks(clone, shorten)
            cuda = emulation.device == "cuda"
            recorder = EventRecorder(fold.blocks, host_scalars=cuda, python_kernels=not cuda)
            fake, data = integers.fake_batch(batch), attached_datamodule(module)
            run_step(recorder, clone, fake, options, callbacks, make_optimizer, datamodule=data)
    events = recorder.result()
    flops, per_block = recorder.flops()
    extra = fold.num_blocks - len(fold.blocks)
    if extra and recorder.gathered_bytes > _NEGLIGIBLE_BYTES:
        raise AlignmentError("a tensor is joined from those of several blocks, so that it grows with their number")
    return Trace(
        events=unroll(events, fold.num_blocks) if extra else events,
        parameters=table,
        optimizer=" + ".join(recorder.optimizers),
        num_blocks=fold.num_blocks,
        block_class=fold.block_class,
        traced_blocks=len(fold.blocks),
        assumptions=tuple(dict.fromkeys(integers.assumptions)),
        assumed=assumed,
        attention_kernels=dict(dispatch.used) if dispatch else {},
        flops=_unrolled(flops, per_block, extra),
        block_flops=per_block,
        operators=_unrolled(*recorder.operators(), extra),
        traffic=_unrolled(*recorder.traffic(), extra),
        host=recorder.host_memory(fold.num_blocks),
    )


def _builds_itself(module: torch.nn.Module) -> bool:
    from lightning.pytorch import LightningModule  # not needed for models without one, and slow to import

    return getattr(type(module), "configure_model", None) not in (None, LightningModule.configure_model)


def _unrolled(total: dict[str, int], per_block: dict[str, int], extra: int) -> dict[str, int]:
    """Counts by phase with that many more blocks."""
    return {phase: count + extra * per_block.get(phase, 0) for phase, count in total.items()}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """What Lightning's `*-true` precisions set while a module builds itself."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _enter_modes(
    stack: contextlib.ExitStack,
    fake_mode: FakeTensorMode,
    integers: RealIntegers,
    emulation: Emulation,
    options: StepOptions,
) -> CudaDispatch | None:
    stack.enter_context(fake_mode)
    dispatch = None
    if emulation.device == "cuda":
        dispatch = stack.enter_context(CudaDispatch(emulation.capability, emulation.attention))
        if options.precision in AUTOCAST_DTYPES:
            stack.enter_context(cuda_autocast_lists())
        stack.enter_context(refuse_fused_recurrence())
    else:
        stack.enter_context(OneDnnWorkspaces(fake_mode))
    stack.enter_context(foreach_defaults(emulation.device == "cuda"))
    stack.enter_context(transformers_not_tracing())
    stack.enter_context(copyable_fakes())
    stack.enter_context(fake_pretrained_weights())
    stack.enter_context(real_quantization_maps(fake_mode))
    stack.enter_context(integers)
    stack.enter_context(readable_fakes(integers))
    return dispatch


@contextlib.contextmanager
def _explained(module: torch.nn.Module, integers: RealIntegers) -> Iterator[None]:
    """Turn what stops a trace into a `TraceError` with the way out."""
    name = type(module).__name__
    try:
        with loggers_at(logging.CRITICAL, FakeTensorMode.__module__):  # it logs what it then raises
            yield
    except AlignmentError:
        raise
    except UNKNOWN_VALUES as error:
        raise TraceError(
            f"The training step of {name} depends on values of tensors, which a trace doesn't have: {error}. {WAY_OUT}"
        ) from error
    except UnknownKernelError as error:
        raise TraceError(f"The training step of {name} can't be traced for CUDA: {error}.") from error
    except Exception as error:
        assumptions = tuple(dict.fromkeys(integers.assumptions))
        after = f" (after {'; '.join(assumptions)})" if assumptions else ""
        raise TraceError(
            f"The training step of {name} can't be traced: {type(error).__name__}: {error}{after}. {WAY_OUT}",
            assumptions,
        ) from error
