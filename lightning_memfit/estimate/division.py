"""`Division`: how a strategy divides a run among ranks; `estimate_rank`: what one of them needs, by tier.

Torch's strategies (DDP, FSDP2, tensor parallelism) are traced themselves (`profile.ranks`): such a profile is that of
one rank already. Of a run under DeepSpeed a trace of one device that holds everything shows the activations; what else
is kept, and where, is known in closed form (`estimate.deepspeed`), which plans, preflights and this module share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_memfit.estimate.deepspeed import (
    NCCL_BYTES,
    PERSISTENT_NUMEL,
    BackwardLevels,
    DeepSpeedMemory,
    DeepSpeedRun,
    OffloadTarget,
    Reduction,
    deepspeed_memory,
)
from lightning_memfit.estimate.estimate import Estimate, LargeTensor, estimate_step, predict_peak_bytes
from lightning_memfit.estimate.placement import torch_placement
from lightning_memfit.estimate.stage3_gathered import gathered_levels, left_gathered
from lightning_memfit.estimate.steady_state import (
    HELD,
    LASTING,
    SteadyState,
    later_phases,
    released_levels,
    second_step,
)
from lightning_memfit.memory import Category, MemoryBreakdown, Tier, format_bytes
from lightning_memfit.memory.parameters import trained
from lightning_memfit.profile.events import CATEGORIES, OUTSIDE, Integers
from lightning_memfit.profile.record import ModelProfile

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from lightning_memfit.device.runtime import RuntimeMemory

_SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)

_DEEPSPEED_SIZES = dict(zip(_SIZES, (5e8, 5e8, 1e9, 5e7, 1e9, 1e9), strict=True))
"""DeepSpeed's own, which a strategy leaves that isn't ours (`deepspeed.runtime.zero.config`, 0.19.8)."""

MODELLED_AS: dict[str, Any] = {
    "reduce_scatter": True,
    "use_multi_rank_bucket_allreduce": True,
    "contiguous_gradients": True,
    "stage3_param_persistence_threshold": PERSISTENT_NUMEL,
    "stage3_module_granularity_threshold": 0,
    "stage3_use_all_reduce_for_fetch_params": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "mics_shard_size": -1,
    "cpu_offload": None,
    "cpu_offload_param": None,
    "zenflow": None,
}
"""Options of `zero_optimization` that change memory, with the values that are modelled: DeepSpeed's defaults."""

MODELLED_OUTSIDE: dict[tuple[str, str], Any] = {
    ("data_types", "grad_accum_dtype"): None,
    ("bf16", "bf16_master_weights_and_grads"): False,
    ("bf16", "bf16_optimizer_states"): False,
    ("fp16", "fp16_master_weights_and_grads"): False,
    ("torch_autocast", "enabled"): False,
}
"""Such options of other sections."""


@dataclass(frozen=True)
class Division:
    """What a strategy does with weights, gradients and optimizer states of a run on `ranks` devices."""

    name: str
    """As the user calls it."""
    stage: int
    """0 replicates (DDP), 1 divides optimizer states, 2 also gradients, 3 also weights."""
    ranks: int = 1
    ranks_per_machine: int = 1
    deepspeed: bool = False
    offload_optimizer: OffloadTarget = "none"
    offload_parameters: OffloadTarget = "none"
    pin_memory: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the `zero_optimization` section that the user has set; our strategies choose the others."""
    pipeline: bool = False
    """With states on disk: whether reading and writing overlap with the step."""
    params_in_host: int = 0
    """With parameters on disk: elements that stay in host memory."""
    copies_gradients: bool = False
    """With DDP: whether its buckets are a copy of the gradients, instead of what the gradients are views of."""
    in_closed_form: bool = False
    """With DDP: a rank is worked out from a trace of one device, as in a process of the run's group none is traced."""

    def to_dict(self) -> dict[str, Any]:
        """Plain figures, ready for JSON."""
        return {
            "name": self.name,
            "stage": self.stage,
            "ranks": self.ranks,
            "ranks_per_machine": self.ranks_per_machine,
            "offload_optimizer": self.offload_optimizer,
            "offload_parameters": self.offload_parameters,
            "traced": self.traced,
        }

    @property
    def traced(self) -> bool:
        """Whether the strategy is traced itself, so that a profile is that of one rank (`profile.ranks`)."""
        return not self.deepspeed and not self.in_closed_form

    @property
    def offloads(self) -> bool:
        """Whether anything is kept off the device."""
        return self.offload_optimizer != "none" or self.offload_parameters != "none"

    def traced_precision(self, precision: str) -> str:
        """The precision to trace: DeepSpeed computes in its own half-precision weights, whatever Lightning calls it."""
        return "bf16-true" if self.deepspeed and "16" in precision else precision

    def run_of(self, profile: ModelProfile, activation_bytes: int = 0) -> DeepSpeedRun:
        """A traced run as DeepSpeed makes it.

        Args:
            profile: Traced in `traced_precision`.
            activation_bytes: Peak of a micro-batch's activations and temporary tensors.
        """
        on_cpu = profile.device_kind.is_host
        plain = SteadyState.of(profile, 1)
        stepped = sum(p.numel * p.itemsize for p in trained(profile.parameters))
        # Strategies choose the fused kernel for a step on the CPU.
        scratch = 0 if on_cpu else min(4.0, 4.0 * (plain.step_bytes - plain.kept_bytes) / max(1, stepped))
        return DeepSpeedRun.with_our_sizes(
            profile.parameters,
            self.stage,
            self.ranks,
            2 if "16" in profile.precision else 4,
            zero=self.sizes,
            pipeline=self.pipeline,
            params_in_host=self.params_in_host,
            state_bytes=_state_bytes(profile),
            scratch_bytes=round(scratch),
            offload_optimizer=self.offload_optimizer,
            offload_parameters=self.offload_parameters,
            pin_memory=self.pin_memory,
            accumulates=profile.accumulate_grad_batches > 1,
            on_cpu=on_cpu,
            buffer_bytes=plain.buffer_bytes,
            activation_bytes=activation_bytes,
            is_fp16=profile.precision.startswith("16"),
        ).gathering_as(profile)


class NotDividedError(ValueError):
    """It isn't known what a strategy keeps on each rank."""


def division_of(strategy: Strategy, name: str, ranks: int, ranks_per_machine: int) -> Division | None:
    """How a Lightning strategy divides a run; None if one device holds everything.

    Args:
        strategy: A strategy, which needs neither devices nor a process group yet.
        name: What to call it in messages.
        ranks: Devices of the run.
        ranks_per_machine: Those on each machine.

    Raises:
        NotDividedError: If that isn't known.
    """
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )

    if isinstance(strategy, DeepSpeedStrategy):
        return _of_deepspeed(strategy, name, ranks, ranks_per_machine)
    if isinstance(strategy, DDPStrategy):
        copies = not strategy._ddp_kwargs.get("gradient_as_bucket_view", False)
        return Division(name, 0, ranks, ranks_per_machine, copies_gradients=copies)
    if isinstance(strategy, ModelParallelStrategy):
        return Division(name, 3, ranks, ranks_per_machine)
    if isinstance(strategy, SingleDeviceStrategy):
        return None
    raise NotDividedError("it is unknown what it keeps on each device")


def division_in_plans(strategy: Strategy, name: str, ranks: int, ranks_per_machine: int) -> Division | None:
    """As `division_of`, for a strategy that plans know; they work out a rank of a sharded run in closed form.

    Raises:
        NotDividedError: If plans don't know it.
    """
    from lightning.pytorch.strategies import ModelParallelStrategy

    division = division_of(strategy, name, ranks, ranks_per_machine)
    # `ModelParallelStrategy` leaves it to the module what is sharded; `FullyShardedStrategy` has these arguments.
    if isinstance(strategy, ModelParallelStrategy) and (
        getattr(strategy, "tensor_parallel_size", None) != 1
        or getattr(strategy, "sharding_size", None) not in (None, ranks)
        or getattr(strategy, "reshard_after_forward", None) is not True
        or getattr(strategy, "blocks", None) is not None
    ):
        raise NotDividedError("plans are for `memfit_fsdp2` with its own arguments, which shards over all ranks")
    return division


def _of_deepspeed(strategy: Any, name: str, ranks: int, ranks_per_machine: int) -> Division:
    zero = strategy.config.get("zero_optimization") or {}
    if zero.get("stage") not in (1, 2, 3):
        raise NotDividedError(f"DeepSpeed's stage {zero.get('stage', 0)} is not modelled")
    places: dict[str, OffloadTarget] = {
        section: zero.get(section, {}).get("device", "none") for section in ("offload_optimizer", "offload_param")
    }
    sections = [zero[section] for section in places if section in zero]
    to_disk = bool(getattr(strategy, "nvme_path", None))  # `ZeroInfinityStrategy` writes its sections when it starts
    if "nvme" in places.values() and not to_disk:
        raise NotDividedError("buffers for disk are modelled for `memfit_zero_infinity` only")
    if any(section.get("ratio", 1.0) != 1.0 for section in sections):
        raise NotDividedError("`ratio` of an offloaded optimizer is not modelled")
    _check_modelled(strategy.config)
    defaults = {} if getattr(strategy, "chooses_sizes", False) else _DEEPSPEED_SIZES
    targets = {key: _target(place, to_disk) for key, place in places.items()}
    return Division(
        name,
        zero["stage"],
        ranks,
        ranks_per_machine,
        deepspeed=True,
        offload_optimizer=targets["offload_optimizer"],
        offload_parameters=targets["offload_param"],
        pin_memory=any(bool(section.get("pin_memory")) for section in sections) and not to_disk,
        sizes={key: int(size) for key, size in {**defaults, **zero}.items() if key in _SIZES and _is_number(size)},
        pipeline=bool(getattr(strategy, "pipeline", False)),
        params_in_host=int(getattr(strategy, "params_in_host", 0)),
    )


def _check_modelled(config: Mapping[str, Any]) -> None:
    """Refuse options of DeepSpeed that change memory in a way that isn't modelled.

    Raises:
        NotDividedError: With their name.
    """
    zero = config["zero_optimization"]
    found = {f"zero_optimization.{key}": (zero.get(key, value), value) for key, value in MODELLED_AS.items()}
    for (section, key), value in MODELLED_OUTSIDE.items():
        found[f"{section}.{key}"] = ((config.get(section) or {}).get(key, value), value)
    found["communication_data_type"] = config.get("communication_data_type"), None
    for name, (value, modelled) in found.items():
        if value != modelled:
            raise NotDividedError(f"`{name}={value}` of DeepSpeed is not modelled")


def _is_number(size: Any) -> bool:
    return isinstance(size, (int, float))


def _target(place: OffloadTarget, to_disk: bool) -> OffloadTarget:
    return "nvme" if to_disk and place != "none" else place


# --- one rank ---------------------------------------------------------------------------------------------------------


def estimate_rank(
    profile: ModelProfile,
    division: Division | None,
    micro_batch_size: int | None = None,
    runtime: RuntimeMemory | None = None,
    num_largest: int = 5,
) -> Estimate:
    """Predict the peak of a rank's training step.

    Args:
        profile: The step on one device, traced in `Division.traced_precision`; of one rank if the division is traced.
        division: What the strategy divides; None for one device that holds everything.
        micro_batch_size: Samples per micro-batch; the profiled size by default.
        runtime: Memory outside the trace on a CUDA device; None for the CPU.
        num_largest: How many of the largest tensors at the peak to list.

    Raises:
        ValueError: If the profile doesn't know that micro-batch size.
        NotDividedError: If the profile shows no second optimizer step, from which on memory is the same in each, or
            states that DeepSpeed can't divide.
    """
    whole = estimate_step(profile, micro_batch_size, runtime, num_largest)
    if division is None:
        return whole
    if division.traced:
        return _with_buffers(whole, _buffer_bytes(profile, division))
    at = _at(profile, micro_batch_size)
    by_phase, phase, breakdown = _on_rank(at, division)
    workspace = runtime.allocated_bytes if runtime is not None else 0
    context = runtime.context_bytes if runtime is not None else 0
    fragmentation = whole.reserved_bytes - whole.allocated_bytes + whole.spare_bytes
    outside = breakdown.get(Category.FRAGMENTATION) + breakdown.get(Category.RUNTIME_CONTEXT)  # not tensors
    tensors = breakdown.total() - outside + workspace
    around = {
        Category.TEMPORARY: workspace,
        Category.FRAGMENTATION: fragmentation,
        Category.RUNTIME_CONTEXT: context,
    }
    reserved = tensors + fragmentation
    return replace(
        whole,
        breakdown=breakdown + MemoryBreakdown.device(around) + MemoryBreakdown.from_dict(profile.host),
        phase=phase,
        allocated_bytes=tensors + whole.spare_bytes,
        reserved_bytes=reserved,
        total_bytes=reserved + context + outside,
        workspace_bytes=workspace,
        by_phase={name: size + workspace + whole.spare_bytes for name, size in by_phase.items()},
        largest=_largest(at, num_largest),
        timeline=None,
    )


def predict_rank_bytes(
    profile: ModelProfile, division: Division, micro_batch_size: int, runtime: RuntimeMemory | None = None
) -> int:
    """Memory that a rank's device must have, without fragmentation, for searches over micro-batch sizes."""
    if division.traced:
        context = runtime.context_bytes if runtime is not None else 0
        return predict_peak_bytes(profile, micro_batch_size, runtime) + context + _buffer_bytes(profile, division)
    _, _, breakdown = _on_rank(_at(profile, micro_batch_size), division)
    return breakdown.total() + (runtime.allocated_bytes + runtime.context_bytes if runtime is not None else 0)


def _buffer_bytes(profile: ModelProfile, division: Division) -> int:
    """Memory of the communicators that is no tensor."""
    return NCCL_BYTES if profile.device_kind.has_own_memory and division.ranks > 1 else 0


def _with_buffers(estimate: Estimate, size_bytes: int) -> Estimate:
    buffers = MemoryBreakdown.device({Category.COMMUNICATION: size_bytes})
    return replace(estimate, breakdown=estimate.breakdown + buffers, total_bytes=estimate.total_bytes + size_bytes)


def _at(profile: ModelProfile, micro_batch_size: int | None) -> ModelProfile:
    size = micro_batch_size or profile.micro_batch_size
    return replace(profile, events=profile.events_at(size), micro_batch_size=size, slopes=None, larger=None)


def _largest(profile: ModelProfile, count: int) -> tuple[LargeTensor, ...]:
    """The largest tensors of forward and backward that are no weights, gradients or states, which are divided."""
    moving = _moving(profile)
    spans = [span for name in ("forward", "backward") for span in later_phases(profile.events, name)]
    peak = max((first + int(moving[first:stop].argmax()) for first, stop in spans), key=lambda at: int(moving[at]))
    found = profile.events.largest_at(peak, len(profile.events.sizes))
    kept = [LargeTensor(*item) for item in found if item[1] not in LASTING]
    return tuple(kept[:count])


def _backward_levels(
    profile: ModelProfile, run: DeepSpeedRun, spans: list[tuple[int, int]], moving: Integers
) -> BackwardLevels:
    """Read off a trace what gradients add on their way to a bucket, and when DeepSpeed reduces a bucket.

    A gradient for which a bucket has no room lets it be reduced first, when what made the gradient is gone already. The
    last gradients are in a bucket, too, when what is left is reduced.
    """
    kept, on_their_way = released_levels(profile.events, profile.device_kind.rounding_bytes, HELD)
    coming = on_their_way - kept
    levels = moving + coming
    if run.stage == 3 and (run.world_size > 1 or not run.on_cpu):
        levels = levels + _gathered_weights(profile, run)
    arrivals = [_arrivals(profile, coming, first, stop) for first, stop in spans]
    whole = _whole_gradients(profile, run, spans, arrivals)
    levels = levels + whole
    added = np.where(whole > 0, coming, 0)  # to the gradients of earlier micro-batches, before anything is reduced
    highest, scattered = 0, 0
    reductions: list[list[Reduction]] = []
    for (first, stop), made in zip(spans, arrivals, strict=True):
        highest = max(highest, int(levels[first:stop].max()))
        reductions.append([])
        waiting: list[int] = []
        for size, end in made:
            if waiting and sum(waiting) + size > run.bucket_size * run.itemsize:
                now = int(levels[end - 1] - added[end - 1])
                scattered = max(scattered, now + run.scattered_copies(waiting))
                reductions[-1].append(Reduction(sum(waiting), now, int(levels[end:stop].max(initial=now))))
                waiting = []
            waiting.append(size)
        if waiting:
            now = int(levels[stop - 1] - coming[stop - 1])
            scattered = max(scattered, now + run.scattered_copies(waiting))
            reductions[-1].append(Reduction(sum(waiting), now, now))
    return BackwardLevels(highest, tuple(map(tuple, reductions)), scattered)


def _arrivals(profile: ModelProfile, coming: Integers, first: int, stop: int) -> list[tuple[int, int]]:
    """Gradients made between two events: the bytes of each, and the event from which on it is no longer on its way.

    Of gradients that are made together, as those of a weight and its bias, the smaller ones are taken to come first.
    """
    events = profile.events
    is_made = (events.categories == CATEGORIES.index(Category.GRADIENT))[events.storages] & (events.events > 0)
    made = first + np.flatnonzero(is_made[first:stop])
    handed_on = np.append(np.flatnonzero(coming == 0), len(events))
    ends = np.minimum(handed_on[np.searchsorted(handed_on, made)], stop)
    found = sorted(zip(ends.tolist(), events.sizes[events.storages[made]].tolist(), strict=True))
    return [(int(size), int(end)) for end, size in found]


def _whole_gradients(
    profile: ModelProfile, run: DeepSpeedRun, spans: list[tuple[int, int]], arrivals: list[list[tuple[int, int]]]
) -> Integers:
    """Bytes of gradients that stage 1 has of earlier micro-batches, after every event.

    It reduces in the last micro-batch only (`reduce_ready_partitions_and_remove_grads`). Until then gradients stay
    whole: a new one is added to its own, and both are gone when that is copied to a bucket. A trace shows as gradients
    those of the first micro-batch, which stands for the last one here. The backward pass of its second micro-batch is
    one of those in between, if there are any.
    """
    whole = np.zeros(len(profile.events), dtype=np.int64)
    if run.stage != 1 or not run.accumulates:
        return whole
    backward = later_phases(profile.events, "backward")
    for (first, stop), made in zip(spans, arrivals, strict=True):
        if made or profile.accumulate_grad_batches > 2 or (first, stop) not in backward:
            whole[first:stop] = sum(run.trained) * run.itemsize
        for size, end in made:
            whole[end:stop] -= size
    return whole


def _gathered_weights(profile: ModelProfile, run: DeepSpeedRun) -> Integers:
    """Bytes of gathered weights beyond those that `DeepSpeedMemory` counts in every pass, after every event.

    Where nothing is gathered ahead, the largest one counts until backward ends.
    """
    levels = run.largest_gathered * run.itemsize + _recomputed_weights(profile, run)
    if run.gathered:
        levels = np.maximum(levels, gathered_levels(profile, run.ahead) * run.itemsize)
    for _, stop in later_phases(profile.events, "backward"):
        levels[stop - 1] = left_gathered(profile, PERSISTENT_NUMEL) * run.itemsize
    return levels - (run.gathered or run.largest_gathered) * run.itemsize


def _recomputed_weights(profile: ModelProfile, run: DeepSpeedRun) -> Integers:
    """Bytes of gathered weights beyond the largest, after every event.

    While a block is recomputed, `torch.utils.checkpoint` keeps what its operators save for their gradients, of weights
    the tensors that are gathered at that moment. So all of the block's are there at once, although stage 3 lets go of
    each after its module. An event in backward with the name of a module is one of a recomputation.
    """
    events = profile.events
    extra = np.zeros(len(events), dtype=np.int64)
    for first, stop in later_phases(events, "backward"):
        within = np.arange(first, stop)
        made = within[(events.events[first:stop] > 0) & (events.event_blocks[first:stop] != OUTSIDE)]
        pairs = np.unique(np.stack([events.event_blocks[made], events.sites[events.storages[made]]]), axis=1)
        for block in np.unique(pairs[0]).tolist():
            names = (events.site_names[site].partition(" | ") for site in pairs[1][pairs[0] == block].tolist())
            owners = {name for name, mark, _ in names if mark}
            numels = [
                p.numel
                for p in profile.parameters
                if p.numel > PERSISTENT_NUMEL and p.name.rpartition(".")[0] in owners and not p.shared_with
            ]
            here = within[events.event_blocks[first:stop] == block]
            extra[here] = max(0, sum(numels) - run.largest_gathered) * run.itemsize
    return extra


def _moving(profile: ModelProfile) -> Integers:
    """Live bytes, after every event, of what comes and goes in a micro-batch."""
    events, rounding = profile.events, profile.device_kind.rounding_bytes
    moves = ~np.isin(events.categories, [CATEGORIES.index(category) for category in LASTING])
    sizes = np.where(moves, events.rounded_sizes(rounding), 0)
    return np.cumsum(np.sign(events.events) * sizes[events.storages])


_MOMENTS = {"setup": "setup", "passes": "forward and backward", "update": "step"}


def _on_rank(profile: ModelProfile, division: Division) -> tuple[dict[str, int], str, MemoryBreakdown]:
    """Bytes of tensors by moment, the moment of the peak, and what there is then.

    Host memory is counted at its own largest moment, and only if something is offloaded.
    """
    if not division.deepspeed:
        return _beside_buckets(profile, division)
    try:
        spans = [span for name in ("forward", "backward") for span in later_phases(profile.events, name)]
        moving = _moving(profile)
        activations = max(int(moving[first:stop].max()) for first, stop in spans)
        run = division.run_of(profile, activations)
        run = replace(run, levels=_backward_levels(profile, run, spans, moving))
    except NotDividedError:
        raise
    except (IndexError, KeyError, ValueError) as error:
        raise NotDividedError("the trace shows no second step like the first") from error
    memory = deepspeed_memory(run).once_built()
    on_device = {_MOMENTS[name]: _device(memory, moment) for name, moment in memory.moments.items() if name in _MOMENTS}
    by_phase = {name: _tensors(moment) for name, moment in on_device.items()}
    phase = max(on_device, key=lambda name: on_device[name].total())
    breakdown = on_device[phase]
    if phase == _MOMENTS["passes"]:
        breakdown = _with_activations(breakdown, activations)
    _, host = memory.host_peak
    tiers = {Tier.DISK} if run.on_cpu else {Tier.PINNED_HOST, Tier.HOST, Tier.DISK} if division.offloads else set()
    elsewhere = {key: size for key, size in host.entries.items() if key[0] in tiers}
    return by_phase, phase, breakdown + MemoryBreakdown(elsewhere)


def _beside_buckets(profile: ModelProfile, division: Division) -> tuple[dict[str, int], str, MemoryBreakdown]:
    """The same under DDP: what a trace shows, with gradients in buckets or beside them."""
    events, rounding = profile.events, profile.device_kind.rounding_bytes
    try:
        plain = SteadyState.of(profile, rounding)
        spans = {name: later_phases(events, name) for name in ("forward", "backward")}
        cuda = profile.device_kind.has_own_memory
        placed = torch_placement(plain, 0, division.ranks, profile.parameters, cuda, division.copies_gradients)
    except (IndexError, KeyError, ValueError) as error:
        raise NotDividedError("the trace shows no second step like the first") from error
    standing = placed.standing
    live, (without, coming) = events.live_bytes(rounding), released_levels(events, rounding, HELD)
    held = live - without if division.copies_gradients else np.full_like(live, standing.gradient_bytes)
    levels = (live if division.copies_gradients else coming + standing.gradient_bytes) + standing.communication_bytes
    by_phase = {name: max(int(levels[first:stop].max()) for first, stop in of) for name, of in spans.items()}
    by_phase["step"] = standing.step_bytes
    phase = max(by_phase, key=lambda name: by_phase[name])
    found = (first + int(levels[first:stop].argmax()) for first, stop in spans.get(phase, []))
    highest = max(found, key=lambda at: int(levels[at]), default=None)
    kept = {
        Category.PARAMETER: standing.parameter_bytes,
        Category.BUFFER: standing.buffer_bytes,
        Category.GRADIENT: standing.gradient_bytes if highest is None else int(held[highest]),
        Category.OPTIMIZER_STATE: standing.state_bytes,
        Category.COMMUNICATION: standing.communication_bytes,
    }
    breakdown = MemoryBreakdown.device(kept)
    rest = Category.TEMPORARY if phase == "step" else Category.ACTIVATION
    return by_phase, phase, breakdown + MemoryBreakdown.device({rest: max(0, by_phase[phase] - breakdown.total())})


def _device(memory: DeepSpeedMemory, moment: MemoryBreakdown) -> MemoryBreakdown:
    """What a moment takes on the device, which on the CPU is all memory."""
    tiers = memory.host_tiers if memory.on_cpu else (Tier.DEVICE,)
    sizes = Counter[Category]()
    for tier in tiers:
        sizes.update(moment.by_category(tier))
    return MemoryBreakdown.device(sizes)


def _tensors(moment: MemoryBreakdown) -> int:
    return moment.total() - moment.get(Category.FRAGMENTATION) - moment.get(Category.RUNTIME_CONTEXT)


def _with_activations(breakdown: MemoryBreakdown, activations: int) -> MemoryBreakdown:
    temporary = breakdown.get(Category.TEMPORARY)
    shown = min(activations, temporary)
    return breakdown.replace(Category.TEMPORARY, temporary - shown) + MemoryBreakdown.device(
        {Category.ACTIVATION: shown}
    )


_NUMBER_BYTES = 8
"""Most bytes of a single number, such as the count of steps."""

_MAP_BYTES = (64, 1024)
"""Bytes of the maps of 4-bit and 8-bit states, whose 16 and 256 values are fp32 in torchao and bitsandbytes."""

_SCALE_BLOCKS = (64, 128, 256)
"""Elements that share an fp32 scale; by larger blocks, factors of adapters would look like scales."""


def why_states_stay_whole(profile: ModelProfile) -> str | None:
    """Why DeepSpeed can't divide the optimizer states of a traced step, or None if nothing is known against it."""
    try:
        _state_bytes(profile)
    except NotDividedError as error:
        return str(error)
    except (IndexError, KeyError, ValueError):  # the trace shows no second step, of which `estimate_rank` tells
        return None
    return None


def _state_bytes(profile: ModelProfile) -> float:
    """Bytes of optimizer states per trained element as DeepSpeed steps: over fp32 masters, not the traced weights.

    A state as large as its parameter has the parameter's dtype, and is fp32 under DeepSpeed.

    Raises:
        NotDividedError: If a state has no fixed number of values per element, as factors of a matrix have not: the flat
            parts of weights that DeepSpeed steps have no rows and columns. Sizes decide, by which the factors that SOAP
            keeps of a square matrix are states of its shape.
    """
    events = profile.events
    own = {p.name: p.numel * p.itemsize for p in profile.parameters}
    widened = {p.name: 4 / p.itemsize for p in profile.parameters}
    elements = {p.name: p.numel for p in profile.parameters}
    states: dict[str, list[int]] = {}
    is_state = events.categories == CATEGORIES.index(Category.OPTIMIZER_STATE)
    for storage in events.alive_at(second_step(events)["step"][1] - 1).tolist():
        if is_state[storage]:
            name = events.site_names[events.sites[storage]].partition(" | ")[0]
            states.setdefault(name, []).append(int(events.sizes[storage]))
    total = 0.0
    for name, sizes in states.items():
        for size in _factors(sizes, elements.get(name, 1)):
            raise NotDividedError(
                f"the states of {profile.optimizer} for `{name}` ({format_bytes(size)}) have no fixed number of "
                "values per element, and DeepSpeed steps flat parts of weights"
            )
        total += sum(size * widened[name] if own.get(name) == size else size for size in sizes)
    return total / max(1, sum(p.numel for p in trained(profile.parameters)))


def _factors(sizes: list[int], numel: int) -> list[int]:
    """Bytes of those of a parameter's states that have no fixed number of bits per element.

    Single numbers don't count, nor scales and maps where there are states of 8 or 4 bits.
    """
    quantized = {2 * size for size in sizes} & {numel, 2 * numel}
    # AdEMAMix has two moments, with their scales, in one state.
    scales = {4 * moments * -(-numel // block) for block in _SCALE_BLOCKS for moments in (1, 2)}
    beside = scales.union(_MAP_BYTES) if quantized else set()
    return [size for size in sizes if 2 * size % numel and size > _NUMBER_BYTES and size not in beside]
