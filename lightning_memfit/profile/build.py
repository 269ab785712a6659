"""Make a `ModelProfile` from a module and one real batch: `profile_module` traces the step, `measure_step` runs it.

Traces at two batch sizes (three for a batch of one that differs in structure, more where samples are compared with each
other) give every other size by arithmetic. A measurement needs real memory and knows one size only; it is for steps
that can't be traced.
"""

import time
from collections.abc import Mapping
from dataclasses import fields, replace
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
from lightning_memfit.profile.events import AlignmentError, fit_sizes
from lightning_memfit.profile.fake import tensors_in
from lightning_memfit.profile.fingerprint import describe_processor
from lightning_memfit.profile.ranks import Ranks, is_alone_under_ddp, own_rank
from lightning_memfit.profile.record import LargerSizes, ModelProfile, RecordedStep
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.step import OptimizerFactory, StepOptions, Workload, run_step
from lightning_memfit.profile.trace import (
    Emulation,
    Trace,
    TraceError,
    TraceRequest,
    isolated,
    recorded,
    somewhere,
    trace_step,
)
from lightning_memfit.profile.work import grouped, with_slopes


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

    first = trace_step(request)
    sizes: dict[str, Any] = _every_size(first, request) if any_micro_batch else {"work": grouped(first.work)}
    profile = _profile(first, sizes, workload, request.emulation.device, time.perf_counter() - started)
    profile = profile.after(workload.epoch_batches)
    if cache is not None and key is not None:
        cache.save(key, profile)
    return profile


def _every_size(first: Trace, request: TraceRequest) -> dict[str, Any]:
    """Trace the step with one more sample, and with further ones where sizes don't follow from two (`fit_sizes`).

    A batch of one may differ in structure from two, from which sizes follow then.
    """
    size = batch_size(request.workload.batch)

    def with_more(samples: int) -> Trace:
        larger = replace(request.workload, batch=resize_batch(request.workload.batch, size, size + samples))
        # A trace that assumed something else than the first would be of another step.
        return trace_step(replace(request, workload=larger, assumed=first.assumed))

    further = cache(with_more)
    try:
        try:
            events, slopes = fit_sizes(first.events, lambda more: further(more).events, size)
            _must_grow_alike(first, further(1))
            return {"events": events, "slopes": slopes, "work": with_slopes(first.work, further(1).work, size)}
        except AlignmentError:
            if size > 1:
                raise
        events, slopes = fit_sizes(further(1).events, lambda more: further(1 + more).events, size + 1)
        _must_grow_alike(further(1), further(2))
        larger = LargerSizes(events, size + 1, slopes)
        return {"larger": larger, "work": with_slopes(first.work, further(1).work, size)}
    except (AlignmentError, TraceError, ValueError) as error:
        return {"work": grouped(first.work), "only_this_size": str(error)}


def _must_grow_alike(smaller: Trace, larger: Trace) -> None:
    """Raise an `AlignmentError` if more samples make memory grow in another way."""
    grown = [
        None if one.growth is None else (one.growth.bytes_per_batch, one.growth.batches) for one in (smaller, larger)
    ]
    if grown[0] != grown[1]:
        raise AlignmentError("memory grows from batch to batch, otherwise at another micro-batch size")


def _profile(
    first: Trace, known: dict[str, Any], workload: Workload, device: DeviceType, seconds: float
) -> ModelProfile:
    """The profile of a trace, with what is known of other sizes."""
    options = workload.options
    of_one_size = {one.name: getattr(first, one.name) for one in fields(RecordedStep)}
    found = ModelProfile(
        **of_one_size,
        name=workload.name,
        micro_batch_size=batch_size(workload.batch),
        precision=options.precision,
        accumulate_grad_batches=options.accumulate_grad_batches,
        device=device,
        sequence_length=sequence_length(workload.batch),
        versions=package_versions(),
        seconds=seconds,
    )
    return replace(found, assumptions=(*first.assumptions, *first.taken), **known)


def batch_size(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one."""
    for tensor in tensors_in(batch):
        if tensor.dim():
            return tensor.size(0)
    raise ValueError("`batch` holds no tensor with a batch dimension. Give the batch as the training loader does.")


def resize_batch(batch: Any, size: int, new_size: int) -> Any:
    """Repeat or drop samples. Tensors whose first dimension is 1 stay whole."""
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
    """The batch with the first tokens of its sequences; tensors whose second dimension is another stay whole."""
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
    known = {"only_this_size": "it was measured, not traced", "measured": True}
    return _profile(found, known, workload, CPU, time.perf_counter() - started)
