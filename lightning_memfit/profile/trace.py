"""Trace one steady optimizer step of a module on fake tensors: without a GPU, without the memory, in another process.

`trace_step` is the entry; each of its attempts runs in a process of its own (`profile.process`). A step may read values
that only real data has: `over_assumptions` then traces with several assumed values, and raises a `TraceError` if memory
depends on them.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.checkpointing.blocks import BlockGroup
from lightning_memfit.memory import Category, format_bytes
from lightning_memfit.memory.conversion import default_dtype, parameter_table
from lightning_memfit.memory.kind import CPU, CUDA, DeviceKind, DeviceType
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.profile.course import DRAWS, Course, LimitReached
from lightning_memfit.profile.culprit import Culprit, runs_steps
from lightning_memfit.profile.dispatch import CudaDispatch, cuda_autocast_lists
from lightning_memfit.profile.events import CATEGORIES, AlignmentError, EventList, without_setup
from lightning_memfit.profile.fake import (
    copyable_fakes,
    fake_pretrained_weights,
    initialized_at_once,
    transformers_not_tracing,
    turn_fake,
)
from lightning_memfit.profile.fake_mode import TracingFakeMode
from lightning_memfit.profile.integers import (
    AssumedValues,
    RealIntegers,
    UnknownSizeError,
)
from lightning_memfit.profile.patches import (
    UnknownKernelError,
    foreach_defaults,
    give_kernels,
    padded_sequences,
    readable_fakes,
    refuse_fused_recurrence,
)
from lightning_memfit.profile.process import Elsewhere, LostError, NoProcessError, RefusedError, run
from lightning_memfit.profile.ranks import process_group_of
from lightning_memfit.profile.record import RecordedStep
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.repeat import Fold, fold_blocks, fold_groups, unroll
from lightning_memfit.profile.step import (
    AUTOCAST_DTYPES,
    TRUE_DTYPES,
    StepOptions,
    Workload,
    run_step,
)
from lightning_memfit.profile.work import with_blocks

T = TypeVar("T")

# --- values that only real data has -----------------------------------------------------------------------------------


UNKNOWN_VALUES = (UnknownSizeError, DataDependentOutputException, DynamicOutputShapeException)
"""Errors raised where even an assumed value doesn't help."""

_PERHAPS = "If training gets past this, measure the step instead with `measure_step` (two real steps of a micro-batch)."
_OWN_ERROR = "A trace has the datamodule of the module's Trainer, if there is one, and no logger."
WAY_OUT = "Measure it instead with `measure_step` (two real steps of a small micro-batch)."

_CHOICES = (
    AssumedValues(),
    AssumedValues(floating=1e6, boolean=True, integer=2),
    AssumedValues(floating=-1e6, boolean=True, integer=0),
)
"""Values on either side of most thresholds that programs compare with."""

_TOLERANCE = 0.005
_WORKING = [CATEGORIES.index(Category.ACTIVATION), CATEGORIES.index(Category.TEMPORARY)]


TraceErrorCause = Literal["", "unknown", "limit", "process"]


class TraceError(RuntimeError):
    """The module's training step can't be traced; the message says what stopped it and what to do instead.

    Args:
        message: What stopped the trace.
        assumptions: Values that were assumed up to then.
        in_build: Whether the module's `configure_model` raised it by itself, as it would in training.
        cause: What stopped it: a value that can't be assumed, a limit of the trace; or that no process can be had for
            it here.
    """

    def __init__(
        self, message: str, assumptions: tuple[str, ...] = (), in_build: bool = False, cause: TraceErrorCause = ""
    ) -> None:
        super().__init__(message)
        self.assumptions = assumptions
        self.in_build = in_build
        self.cause = cause


def isolated(workload: Workload, function: Callable[[], T], doing: str, way_out: str, with_values: bool = False) -> T:
    """Run a function on a workload in a process that is thrown away."""
    try:
        return run(partial(_with_gradients, function), workload.limits.seconds, with_values=with_values)
    except (LimitReached, LostError, RefusedError) as error:
        if isinstance(error, LimitReached) or (isinstance(error, LostError) and "after" in str(error)):
            raise TraceError(
                f"The training step of {workload.name} was not known: {error}. Give more room with `limits` "
                f"(`TraceLimits`){way_out}",
                cause="limit",
            ) from error
        raise TraceError(f"The training step of {workload.name} can't be {doing}: {error}.") from error


@contextlib.contextmanager
def somewhere(name: str, *shared: object, with_values: bool = False) -> Iterator[Elsewhere]:
    """Lend what runs tasks with traces: here, or where this process can't be forked in a new one."""
    elsewhere = Elsewhere(*shared, with_values=with_values)
    try:
        yield elsewhere
    except (LostError, NoProcessError) as error:
        if elsewhere.is_inner:
            raise
        raise TraceError(
            f"The training step of {name} can't be run here: {str(error).rstrip('.')}. Use `memfit estimate`, or do so "
            "before the first backward pass of the process, and before it uses CUDA.",
            cause="process",
        ) from error
    finally:
        elsewhere.close()


def _with_gradients(function: Callable[[], T]) -> T:
    with torch.inference_mode(False), torch.enable_grad():
        return function()


def over_assumptions(name: str, trace: Callable[[AssumedValues], "Trace"], several: bool = True) -> "Trace":
    """Trace once if no value has to be assumed, otherwise with several; the trace with the highest peak is returned.

    Choices that make the step end in an error of the module itself (`assert (scores >= 0).all()`) don't count.
    """
    found: list[Trace] = []
    failure: TraceError | None = None
    for assumed in (*_CHOICES, AssumedValues(all_distinct=False)):
        if found and not assumed.all_distinct:  # metrics refuse more values than classes
            break
        try:
            result = trace(assumed)
        except TraceError as error:
            if error.cause or not error.assumptions:
                raise
            failure = failure or error
            continue
        if not result.assumptions or not several:
            return result
        if found and not _allocate_alike(found[0].events, result.events):
            raise TraceError(
                f"What {name}'s training step allocates depends on values that only real data can tell: "
                f"{'; '.join(found[0].assumptions)}. {WAY_OUT}"
            )
        found.append(result)
    if not found:
        assert failure is not None
        raise failure
    return max(found, key=lambda result: int(result.events.live_bytes().max()))


def _allocate_alike(first: EventList, second: EventList) -> bool:
    """Whether every phase of two traces has the same peak, but for 0.5 % of the working memory."""
    if [name for _, name in first.phases] != [name for _, name in second.phases]:
        return False
    differences = np.abs(_phase_peaks(first) - _phase_peaks(second))
    return bool(np.all(differences <= _TOLERANCE * _working_bytes(first)))


def _working_bytes(events: EventList) -> int:
    """Peak of activations and temporaries: the part that grows with the batch."""
    working = np.isin(events.categories, _WORKING)
    steps = np.sign(events.events) * (events.sizes * working)[events.storages]
    return int(np.cumsum(steps).max(initial=0))


def _phase_peaks(events: EventList) -> np.ndarray:
    live = events.live_bytes()
    edges = [at for at, _ in events.phases]
    return np.array([part.max(initial=0) for part in np.split(live, edges)])


# --- the trace --------------------------------------------------------------------------------------------------------


GroupFinder = Callable[[torch.nn.Module], list[BlockGroup]]
"""Finds groups of blocks in a module or its fake clone."""


@dataclass(frozen=True)
class Emulation:
    """The device whose operators a trace issues."""

    device: DeviceType = CUDA
    """`cpu` leaves torch's CPU dispatch as it is."""
    capability: tuple[int, int] = (8, 0)
    """CUDA compute capability; decides the attention kernel."""


@dataclass(frozen=True, kw_only=True)
class Trace(RecordedStep):
    """A traced run of optimizer steps, and what was assumed for it."""

    taken: tuple[str, ...] = ()
    """Assumptions to which there is no second choice, in words."""
    assumed: AssumedValues = field(default_factory=AssumedValues)
    """The assumed values that this trace was made with."""
    draws: bool = False
    """Whether the step depends on numbers that it draws."""


@dataclass(frozen=True)
class TraceRequest:
    """A trace to make."""

    workload: Workload
    """What is trained. Its module's tensors may be real or meta; the integers of its batch steer control flow."""
    emulation: Emulation = Emulation()
    """Device whose operators are traced."""
    shorten: bool = True
    """Whether to trace five repeated blocks, and to unroll where they are proved alike, instead of every block."""
    check_assumptions: bool = True
    """Whether to trace with several values where one has to be assumed. False is for variants of a step that has been
    traced with them."""
    find_groups: GroupFinder | None = None
    """Finds the groups of blocks to tell apart; by default the largest one that is found by structure."""
    assumed: AssumedValues | None = None
    """Values to assume where one has to be, without trying others."""


_NEGLIGIBLE_BYTES = 4096
"""Gradient clipping joins the norms of all parameters, four bytes each."""


def trace_step(request: TraceRequest) -> Trace:
    """Trace optimizer steps of a module, which stays as it was, until two in a row are alike."""

    def trace(request: TraceRequest) -> Trace:
        if request.assumed is not None:
            return _attempt(request, request.assumed)
        return over_assumptions(request.workload.name, partial(_attempt, request), request.check_assumptions)

    depends_on_depth = any(getattr(one, "depends_on_depth", False) for one in request.workload.callbacks)
    if request.shorten and not depends_on_depth:
        # An error with fewer blocks says nothing about the module: the trace of the whole module decides.
        try:
            return trace(request)
        except AlignmentError:
            pass
        except TraceError as error:
            if error.cause == "limit":
                raise
    return trace(replace(request, shorten=False))


def _attempt(request: TraceRequest, assumed: AssumedValues) -> Trace:
    way_out = " if the step is only long. " + WAY_OUT
    return isolated(request.workload, partial(_trace, replace(request, assumed=assumed)), "traced", way_out)


@runs_steps
def _trace(request: TraceRequest) -> Trace:
    """Trace a module itself, whose tensors become fakes: this is for a process that is thrown away."""
    workload, emulation = request.workload, request.emulation
    module, options, ranks = workload.module, workload.options, workload.ranks
    fake_mode = TracingFakeMode()
    integers = RealIntegers(fake_mode, request.assumed or AssumedValues())
    # A ledger of a run around this one, as where a plan is made within a measured step, must not count the fakes.
    with _disable_current_modes(), _explained(workload.name, integers), process_group_of(ranks):
        true_dtype = TRUE_DTYPES.get(options.precision)
        builds_itself = workload.make_optimizer is None and _builds_itself(module)
        table = parameter_table(module, true_dtype)
        fold = Fold((), 0, "") if builds_itself else _folded(module, request)
        trainer = getattr(module, "_trainer", None)
        turn_fake(workload.batch, fake_mode, integers.remember_batch)
        turn_fake(module, fake_mode, integers.remember_counter, true_dtype, [trainer])
        turn_fake(workload.callbacks, fake_mode, integers.remember_counter, None, [trainer])
        with contextlib.ExitStack() as stack:
            dispatch = _enter_modes(stack, fake_mode, integers, emulation, options)
            if builds_itself:
                with default_dtype(true_dtype), _building(module):
                    module.configure_model()  # type: ignore[operator]
                table, fold = parameter_table(module), _folded(module, request)
            cuda = DeviceKind.of(emulation.device).emulated_dispatch
            recorder = EventRecorder(
                fold.blocks,
                cuda=emulation.capability if cuda else None,
                python_kernels=not cuda,
                wrappers=_wrappers() if ranks else (),
            )
            course = run_step(recorder, workload)
    ran = replace(
        recorded(recorder, course, table, fold.num_blocks),
        block_class=fold.block_class,
        traced_blocks=len(fold.blocks),
        assumptions=tuple(dict.fromkeys(integers.assumptions)),
        taken=tuple(dict.fromkeys(integers.taken)),
        assumed=integers.assumed,
        attention_kernels=dict(dispatch.used) if dispatch else {},
        work=recorder.work()[0],
        draws=course.draws or integers.draw_decided,
    )
    if integers.draw_decided and not course.draws:
        ran = replace(ran, remarks=(*ran.remarks, DRAWS))
    if ranks is not None:
        ran = _once_divided(ran, builds_itself)
    return _with_every_block(ran, fold, recorder, course)


def _folded(module: torch.nn.Module, request: TraceRequest) -> Fold:
    if request.find_groups is not None:
        return fold_groups(module, request.find_groups(module), request.shorten)
    return fold_blocks(module, request.shorten)


def recorded(
    recorder: EventRecorder, course: Course, parameters: tuple[ParameterInfo, ...], num_blocks: int = 0
) -> Trace:
    """Read what ran from what followed it."""
    flops, per_block = recorder.flops()
    return Trace(
        events=recorder.result(),
        parameters=parameters,
        calls_itself=recorder.calls_itself,
        optimizer=" + ".join(recorder.optimizers),
        optimizer_groups=tuple(recorder.optimizer_groups),
        num_blocks=num_blocks,
        flops=flops,
        block_flops=per_block,
        host=recorder.host_memory(num_blocks).to_dict(),
        traced_batches=course.batches,
        growth=course.growth,
        remarks=(*course.remarks, *recorder.remarks()),
    )


def _once_divided(ran: Trace, builds_itself: bool) -> Trace:
    """The trace of a rank from where the strategy has divided the module."""
    ran = replace(ran, events=without_setup(ran.events))
    whole = sum(info.numel * info.itemsize for info in ran.parameters if not info.shared_with)
    if not builds_itself or whole <= int(ran.events.live_bytes().max(initial=0)):
        return ran
    more = f"before the strategy divides it, every rank builds the whole module ({format_bytes(whole)}), which is more"
    return replace(ran, remarks=(*ran.remarks, more))


def _with_every_block(ran: Trace, fold: Fold, recorder: EventRecorder, course: Course) -> Trace:
    """The trace of a module with all its blocks, from that of the few which ran."""
    extra = fold.num_blocks - len(fold.blocks)
    if not extra:
        return ran
    if recorder.gathered_bytes > _NEGLIGIBLE_BYTES:
        raise AlignmentError("a tensor is joined from those of several blocks, so that it grows with their number")
    if ran.draws:
        raise AlignmentError("the step draws random numbers, by which it may leave blocks out")
    if course.callback_bytes > _NEGLIGIBLE_BYTES:
        raise AlignmentError("a callback makes tensors, perhaps for every block")
    return replace(
        ran,
        events=unroll(ran.events, fold.num_blocks),
        flops={phase: count + extra * ran.block_flops.get(phase, 0) for phase, count in ran.flops.items()},
        work=with_blocks(*recorder.work(), extra),
    )


def _wrappers() -> tuple[type, ...]:
    """Classes of tensors that strategies divide."""
    from torch.distributed.tensor import DTensor

    return (DTensor,)


def of_built(module: torch.nn.Module, read: Callable[[torch.nn.Module], T]) -> T:
    """Read something of a LightningModule as it is once it has built itself (`configure_model`), on fakes elsewhere.

    Values that it reads of weights meanwhile are assumed, as in a trace.
    """
    if not _builds_itself(module):
        return read(module)
    task = partial(isolated, Workload(module, None), partial(_build_and_read, module, read), "built", ".")
    with somewhere(type(module).__name__, module) as elsewhere:
        return elsewhere.run(task)


def _build_and_read(module: torch.nn.Module, read: Callable[[torch.nn.Module], T]) -> T:
    fake_mode = TracingFakeMode()
    integers = RealIntegers(fake_mode)
    with _disable_current_modes(), _explained(type(module).__name__, integers), contextlib.ExitStack() as stack:
        turn_fake(module, fake_mode, integers.remember_counter, left_out=[getattr(module, "_trainer", None)])
        _enter_modes(stack, fake_mode, integers, Emulation(CPU), StepOptions())
        with _building(module):
            module.configure_model()  # type: ignore[operator]
        return read(module)


def _builds_itself(module: torch.nn.Module) -> bool:
    from lightning.pytorch import LightningModule  # not needed for models without one, and slow to import

    return getattr(type(module), "configure_model", None) not in (None, LightningModule.configure_model)


def _enter_modes(
    stack: contextlib.ExitStack,
    fake_mode: TracingFakeMode,
    integers: RealIntegers,
    emulation: Emulation,
    options: StepOptions,
) -> CudaDispatch | None:
    stack.enter_context(fake_mode)
    dispatch = None
    if DeviceKind.of(emulation.device).emulated_dispatch:
        dispatch = stack.enter_context(CudaDispatch(emulation.capability))
        if options.precision in AUTOCAST_DTYPES:
            stack.enter_context(cuda_autocast_lists())
        stack.enter_context(refuse_fused_recurrence())
    give_kernels(fake_mode, DeviceKind.of(emulation.device).emulated_dispatch)
    stack.enter_context(foreach_defaults(DeviceKind.of(emulation.device).emulated_dispatch))
    stack.enter_context(padded_sequences())
    stack.enter_context(transformers_not_tracing())
    stack.enter_context(initialized_at_once())
    stack.enter_context(copyable_fakes())
    stack.enter_context(fake_pretrained_weights())
    stack.enter_context(integers)
    stack.enter_context(readable_fakes(integers))
    return dispatch


@contextlib.contextmanager
def _explained(name: str, integers: RealIntegers) -> Iterator[None]:
    """Turn an error that stops a trace into a `TraceError` that says what to do."""
    try:
        yield
    except (AlignmentError, TraceError):
        raise
    except UNKNOWN_VALUES as error:
        raise TraceError(
            f"The training step of {name} depends on values of tensors, which a trace doesn't have: {error}"
            f"{_at(Culprit.of(error))}. {WAY_OUT}",
            cause="unknown",
        ) from error
    except UnknownKernelError as error:
        raise TraceError(f"The training step of {name} can't be traced: {error}{_at(Culprit.of(error))}.") from error
    except Exception as error:
        assumptions = tuple(dict.fromkeys((*integers.assumptions, *integers.taken)))
        culprit = Culprit.of(error)
        first_line = str(error).partition("\n")[0]
        told = f"{type(error).__name__}: {first_line.rstrip('.')}{_at(culprit)}"
        if culprit.is_own and not assumptions and "Fake" not in str(error):
            message = f"The training step of {name} ends in an error of its own: {told}. {_OWN_ERROR}"
        else:
            after = f" (after {'; '.join(assumptions)})" if assumptions else ""
            message = f"The training step of {name} can't be traced: {told}{after}. {_PERHAPS}"
        raise TraceError(message, assumptions) from error


@contextlib.contextmanager
def _building(module: torch.nn.Module) -> Iterator[None]:
    """Tell a mistake in what a module shall be from a step that can't be traced: training would end in the same."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, ImportError) as error:
        culprit = Culprit.of(error)
        # Our own modules refuse their arguments by a ValueError; what else torch and we raise may be of fake tensors.
        if not (culprit.is_own or type(error) is ValueError) or "Fake" in str(error):
            raise
        first_line = str(error).partition("\n")[0]
        told = f"{type(error).__name__}: {first_line.rstrip('.')}{_at(culprit)}"
        raise TraceError(f"{type(module).__name__} can't be built: {told}.", in_build=True) from error


def _at(culprit: Culprit) -> str:
    return f" ({culprit.place})" if culprit.place else ""
