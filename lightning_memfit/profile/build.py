"""Make a `ModelProfile` from a module and one real batch: `profile_module` traces the step, `measure_step` runs it.

Traces at two batch sizes (three for a batch of one that differs in structure, more where samples are compared with each
other) give every other size by arithmetic. A measurement needs real memory and knows one size only; it is for steps
that can't be traced.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.kind import CPU, DeviceType
from lightning_memfit.profile.cache import ProfileCache, package_versions, profile_key
from lightning_memfit.profile.callbacks import acting_callbacks
from lightning_memfit.profile.course import TraceLimits
from lightning_memfit.profile.culprit import runs_steps
from lightning_memfit.profile.events import AlignmentError, EventList, Floats, fit_sizes
from lightning_memfit.profile.fake import tensors_in
from lightning_memfit.profile.fingerprint import describe_processor
from lightning_memfit.profile.integers import AssumedValues
from lightning_memfit.profile.ranks import Ranks, is_alone_under_ddp, own_rank
from lightning_memfit.profile.record import LargerSizes, ModelProfile, RecordedStep
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.step import OptimizerFactory, StepOptions, Workload, run_step
from lightning_memfit.profile.trace import (
    Emulation,
    Trace,
    TraceError,
    TraceRequest,
    begin_trace,
    isolated,
    recorded,
    somewhere,
    trace_step,
)
from lightning_memfit.profile.work import PhaseWork, grouped, with_slopes


def profile_module(
    module: torch.nn.Module,
    batch: Any,
    options: StepOptions | None = None,
    emulation: Emulation | None = None,
    callbacks: tuple[Any, ...] = (),
    make_optimizer: OptimizerFactory | None = None,
    any_micro_batch: bool = True,
    shorten: bool = True,
    check_assumptions: bool = True,
    cache: ProfileCache | None = None,
    limits: TraceLimits | None = None,
    ranks: Ranks | None = None,
) -> ModelProfile:
    """Profile one training step of a module.

    Args:
        module: LightningModule, or with `make_optimizer` a Hugging Face model. It is never changed.
        batch: One real batch as the loader gives it, at the micro-batch size of interest.
        options: Precision, accumulation, clipping.
        emulation: Device whose operators are traced.
        callbacks: Technique callbacks to apply. Of the other callbacks of the Trainer that the module
            belongs to, those that act in a step are traced as well; what can't be traced is named in the remarks.
        make_optimizer: Builds the optimizer for a module that is not a LightningModule.
        any_micro_batch: Trace one or two more sizes, so that every other follows by arithmetic.
        shorten: Trace five repeated blocks and unroll where they are proved alike.
        check_assumptions: See `TraceRequest`.
        cache: Where profiles are kept between runs; none by default.
        limits: Where each trace ends at the latest: after 120 seconds by default.
        ranks: Profile one rank of a run on several devices, under the run's own strategy. By default that of the
            Trainer that the module belongs to, if it is DDP on one device.

    Raises:
        TraceError: If the step can't be traced; use `measure_step` then.
    """
    options, emulation, limits = options or StepOptions(), emulation or Emulation(), limits or TraceLimits()
    if ranks is None and make_optimizer is None:
        ranks = own_rank(module)

    callbacks = _with_acting(callbacks, module, make_optimizer)
    workload = Workload(module, batch, options, callbacks, make_optimizer, limits, ranks)
    request = TraceRequest(workload, emulation, shorten, check_assumptions)
    with somewhere(workload.name, module, batch, *callbacks) as elsewhere:
        return elsewhere.run(partial(_traced, request, any_micro_batch, cache))


def _with_acting(given: tuple[Any, ...], module: Any, make_optimizer: OptimizerFactory | None) -> tuple[Any, ...]:
    """Callbacks, and those of the module's Trainer that act in a step."""
    others = () if make_optimizer else acting_callbacks(module)
    return (*given, *(other for other in others if all(other is not one for one in given)))


def _traced(request: TraceRequest, any_micro_batch: bool, cache: ProfileCache | None) -> ModelProfile:
    """See `profile_module`."""
    workload, check = request.workload, request.check_assumptions
    module, batch = workload.module, workload.batch
    key = None
    if cache is not None:
        ranks = None if workload.ranks is None else workload.ranks.settings()
        settings = (
            *(workload.options, request.emulation, workload.callbacks, workload.make_optimizer, any_micro_batch),
            *(
                request.shorten,
                workload.limits,
                workload.epoch_batches,
                ranks,
                describe_processor(request.emulation.device),
            ),
        )
        for checked in dict.fromkeys((check, True)):  # a checked one answers who doesn't ask for that, too
            own = profile_key(module, batch, *settings, checked)
            known = None if own is None else cache.load(own)
            if known is not None:
                return known
            key = own if checked is check else key
    started = time.perf_counter()

    ahead: list[Callable[[], Trace]] = []
    if any_micro_batch:
        # A batch of one mostly differs in structure from two, as those of GPT-2, Llama and BERT do.
        samples = (1, 2) if batch_size(batch) == 1 else (1,)
        ahead = [begin_trace(request, partial(_grown, more, AssumedValues())) for more in samples]
    first = trace_step(request)
    sizes = _every_size(first, request, ahead) if any_micro_batch else _Sizes(first.events, work=grouped(first.work))
    profile = _profile(first, sizes, workload, request.emulation.device, time.perf_counter() - started)
    profile = profile.after(workload.epoch_batches)
    if cache is not None and key is not None:
        cache.save(key, profile)
    return profile


@dataclass(frozen=True)
class _Sizes:
    """A step's events at the size of its batch, and what is known about other sizes."""

    events: EventList
    slopes: Floats | None = None
    larger: LargerSizes | None = None
    work: PhaseWork = field(default_factory=dict)
    """Of the first trace's operators, with what it grows by."""
    growth_slope: float = 0.0
    """Bytes by which the growth per batch rises with every sample."""
    reason: str = ""
    """Why nothing is known about other sizes."""


def _every_size(first: Trace, request: TraceRequest, ahead: Sequence[Callable[[], Trace]]) -> _Sizes:
    """Trace the step with one more sample, and with further ones where sizes don't follow from two (`fit_sizes`).

    A batch of one may differ in structure from two, from which sizes follow then.

    Args:
        first: Trace at the size of the batch.
        request: What it was made of.
        ahead: Return traces with one and two more samples that assumed the first choice of values, as far as they were
            started.
    """
    size = batch_size(request.workload.batch)

    def with_more(samples: int) -> Trace:
        if first.assumed == AssumedValues() and len(ahead) >= samples:
            return ahead[samples - 1]()
        # A trace that assumed something else would be of another step.
        return trace_step(_grown(samples, first.assumed, request))

    further = cache(with_more)
    try:
        try:
            events, slopes = fit_sizes(first.events, lambda more: further(more).events, size)
            known = first, further(1)
            return _Sizes(events, slopes, None, with_slopes(first.work, known[1].work, size), _growth_slope(*known))
        except AlignmentError:
            if size > 1:
                raise
        known = further(1), further(2)
        events, slopes = fit_sizes(known[0].events, lambda more: further(1 + more).events, size + 1)
        larger = LargerSizes(events, size + 1, slopes)
        work = with_slopes(first.work, known[0].work, size)
        return _Sizes(first.events, None, larger, work, _growth_slope(*known))
    except (AlignmentError, TraceError, ValueError) as error:
        return _Sizes(first.events, work=grouped(first.work), reason=str(error))


def _grown(more: int, assumed: AssumedValues, request: TraceRequest) -> TraceRequest:
    """A trace of the batch with some of its samples repeated, and with given assumed values."""
    batch = request.workload.batch
    size = batch_size(batch)
    larger = replace(request.workload, batch=resize_batch(batch, size, size + more))
    return replace(request, workload=larger, assumed=assumed)


def _growth_slope(smaller: Trace, larger: Trace) -> float:
    """Bytes by which one more sample makes memory grow faster.

    Raises:
        AlignmentError: If it grows at one of the sizes only.
    """
    if smaller.growth is None and larger.growth is None:
        return 0.0
    if smaller.growth is None or larger.growth is None or smaller.growth.batches != larger.growth.batches:
        raise AlignmentError("memory grows otherwise at another micro-batch size")
    return float(larger.growth.bytes_per_batch - smaller.growth.bytes_per_batch)


def _profile(first: Trace, sizes: _Sizes, workload: Workload, device: DeviceType, seconds: float) -> ModelProfile:
    growth, options = first.growth, workload.options
    of_one_size = {one.name: getattr(first, one.name) for one in fields(RecordedStep)}
    found = ModelProfile(
        **of_one_size,
        name=workload.name,
        micro_batch_size=batch_size(workload.batch),
        slopes=sizes.slopes,
        larger=sizes.larger,
        precision=options.precision,
        accumulate_grad_batches=options.accumulate_grad_batches,
        device=device,
        sequence_length=sequence_length(workload.batch),
        only_this_size=sizes.reason,
        versions=package_versions(),
        seconds=seconds,
    )
    return replace(
        found,
        events=sizes.events,
        work=sizes.work,
        growth=None if growth is None else replace(growth, bytes_per_sample=sizes.growth_slope),
        assumptions=(*first.assumptions, *first.taken),
    )


def batch_size(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one.

    Raises:
        ValueError: If the batch holds no tensor with a dimension.
    """
    for tensor in tensors_in(batch):
        if tensor.dim():
            return tensor.size(0)
    raise ValueError("`batch` holds no tensor with a batch dimension. Give the batch as the training loader does.")


def resize_batch(batch: Any, size: int, new_size: int) -> Any:
    """Repeat or drop samples. Tensors whose first dimension is 1 stay whole.

    Raises:
        ValueError: If the batch holds tensors with other first dimensions, or objects that can't be looked into: which
            tensors grow with the micro-batch, and how, would be a guess.
    """
    others = sorted({tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()} - {1, size})
    if others:
        raise ValueError(
            f"tensors of the batch differ in their first dimension ({size} and {', '.join(map(str, others))}), so how "
            "it grows with the micro-batch can't be told"
        )

    def resize(leaf: torch.Tensor) -> torch.Tensor:
        return leaf[torch.arange(new_size) % size] if leaf.dim() and leaf.size(0) == size else leaf

    try:
        resized = apply_to_collection(batch, torch.Tensor, resize)
    except Exception as error:
        raise ValueError(f"a batch of class {type(batch).__name__} can't be resized: {error}") from error
    if size != new_size and any(tensor.dim() and tensor.size(0) == size for tensor in tensors_in(resized)):
        raise ValueError(f"a batch of class {type(batch).__name__} holds tensors where they can't be resized")
    return resized


def sequence_length(batch: Any) -> int | None:
    """Tokens per sample where the batch has `input_ids` of shape (batch, sequence)."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.size(1)) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None


def shortened(batch: Any, length: int, shorter: int) -> Any:
    """The batch with the first tokens of its sequences; tensors whose second dimension is another stay whole.

    Args:
        batch: A batch with `input_ids` of shape (batch, `length`).
        length: Tokens per sample.
        shorter: Tokens to keep.
    """
    return apply_to_collection(
        batch, torch.Tensor, lambda leaf: leaf[:, :shorter] if leaf.dim() >= 2 and leaf.size(1) == length else leaf
    )


# --- measuring instead of tracing -------------------------------------------------------------------------------------


def measure_step(
    module: torch.nn.Module,
    batch: Any,
    options: StepOptions | None = None,
    callbacks: tuple[Any, ...] = (),
    make_optimizer: OptimizerFactory | None = None,
    limits: TraceLimits | None = None,
) -> ModelProfile:
    """Run real optimizer steps on the CPU, in another process, until two in a row are alike; record what they allocate.

    Gradients, optimizer states and weights that are updated need real memory. The module stays as it was.

    Args:
        module: LightningModule with real weights, or with `make_optimizer` a Hugging Face model.
        batch: One real batch as the loader gives it.
        options: Precision, accumulation, clipping.
        callbacks: Technique callbacks to apply. Other callbacks of the module's Trainer: as in a trace.
        make_optimizer: Builds the optimizer for a module that is not a LightningModule.
        limits: Where the run ends at the latest: after 120 seconds by default.

    Raises:
        TraceError: If the limits were reached before every optimizer's second step, or the step would change something
            outside of its process, such as a file.
    """
    options, limits = options or StepOptions(), limits or TraceLimits()

    callbacks = _with_acting(callbacks, module, make_optimizer)
    workload = Workload(module, batch, options, callbacks, make_optimizer, limits)
    with somewhere(workload.name, module, batch, *callbacks, with_values=True) as elsewhere:
        way_out = ", or measure a smaller configuration."
        task = partial(isolated, workload, partial(_measured, workload), "measured", way_out, with_values=True)
        found = elsewhere.run(task).after(workload.epoch_batches)
    if not is_alone_under_ddp(module):
        return found
    remark = "the buckets of DDP, as large as the gradients, are not in the figures: a step is measured without them"
    return replace(found, remarks=(*found.remarks, remark))


@runs_steps
def _measured(workload: Workload) -> ModelProfile:
    """Train a module itself: this is for a process that is thrown away."""
    started = time.perf_counter()
    recorder = EventRecorder(python_kernels=True)
    course = run_step(recorder, workload)
    found = recorded(recorder, course, parameter_table(workload.module))
    sizes = _Sizes(found.events, reason="it was measured, not traced")
    return replace(_profile(found, sizes, workload, CPU, time.perf_counter() - started), measured=True)
