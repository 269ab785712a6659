"""What DeepSpeed keeps on one rank, by tier and moment: the one model behind plans, preflights and host checks.

`DeepSpeedRun` describes a run, and `deepspeed_memory` gives the memory that it takes. On the CPU, device and host
memory are one and add up. Every formula names the buffer of DeepSpeed 0.19.8 that it counts, in
`runtime/zero/stage_1_and_2.py` (`DeepSpeedZeroOptimizer`, stages 1 and 2), `runtime/zero/stage3.py`
(`DeepSpeedZeroOptimizer_Stage3`) and `runtime/swap_tensor`. Tests compare them with measured peaks of resident memory
(`benchmarks/results/offload_host_memory.json`), with single buffers and their page-locked parts
(`deepspeed_buffers.json`), and with the tensors between two steps (`strategies_cpu.json`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from lightning_memfit.estimate.deepspeed_sizes import (
    AioSettings,
    InfinitySizes,
    ModelSizes,
    infinity_sizes,
    sub_groups,
    zero_sizes,
)
from lightning_memfit.estimate.stage3_gathered import GatherSizes, gathered_levels
from lightning_memfit.memory import MIB, Category, MemoryBreakdown, Tier
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.profile.record import ModelProfile

OffloadTarget = Literal["none", "cpu", "nvme"]

NCCL_BYTES = 512 * MIB
"""What NCCL keeps on a device beyond tensors; an assumption, as it depends on topology and version."""

LIBRARIES_BYTES = 80 * MIB
"""Memory that a process takes between the preflight and its second step for code, threads and Python objects: kernels
that are loaded or compiled when first used, hooks, the engine. Measured, see `benchmarks/offload_host_memory`."""

ASYNC_IO_BYTES = 10 * MIB
"""Memory that asynchronous I/O takes for its kernels, queues and threads."""

PERSISTENT_NUMEL = 100_000
"""Parameters up to this size stay on the device (`stage3_param_persistence_threshold`, DeepSpeed's default)."""

_FP16, _FP32, _FP64 = 2, 4, 8
_NORM_CHUNK = 250_000_000  # elements, `_constant_buffered_norm2`; stages 1 and 2 widen a whole gradient


class Reduction(NamedTuple):
    """A bucket that is full, or what is left when backward ends, in bytes."""

    size: int
    """Of the gradients in it."""
    now: int
    """Level when it is reduced."""
    later: int
    """Highest level from then to the end of backward."""


@dataclass(frozen=True)
class BackwardLevels:
    """Highest bytes of activations, temporary tensors and of gradients that are on their way to a bucket.

    With them are the whole gradients of earlier micro-batches that stage 1 has.
    """

    highest_bytes: int
    """Over forward and backward."""
    reductions: tuple[tuple[Reduction, ...], ...] = ()
    """In every backward pass, one after the other."""
    scattered_bytes: int = 0
    """While stage 3 reduces a bucket, with the copies that `DeepSpeedRun.scattered_copies` counts."""


@dataclass(frozen=True)
class DeepSpeedRun:
    """The facts about a run that decide the memory of its ranks. Sizes are in elements unless the name says bytes.

    Raises:
        ValueError: If nothing is trained, or disk is used without `sizes`.
    """

    parameters: Sequence[ParameterInfo]
    """All parameters at their full size, from `parameter_table` or `ModelShape`."""
    stage: int = 3
    world_size: int = 1
    itemsize: int = 2
    """Bytes per element of the weights and gradients."""
    state_bytes: float = 8
    """Bytes of optimizer states per trained element; by default AdamW's, in fp32 whatever the weights are."""
    scratch_bytes: int = 0
    """Bytes per element that the optimizer's step needs on the device: 4 with `foreach`, none if it is fused."""
    offload_optimizer: OffloadTarget = "none"
    offload_parameters: OffloadTarget = "none"
    bucket_size: int = 0
    """`reduce_bucket_size`."""
    sub_group_size: int = 0
    """Only for stage 3 without disk; 0 means one sub-group."""
    sizes: InfinitySizes | None = None
    """Buffer sizes; needed if anything is on disk."""
    pin_memory: bool = False
    """Whether buffers on the host are page-locked. Some always are; with the CPU as the device, only those for disk."""
    accumulates: bool = False
    """Whether an optimizer step takes more than one micro-batch."""
    on_cpu: bool = False
    """Whether the CPU is the device: a weight that is already whole is then used in place."""
    buffer_bytes: int = 0
    """Buffers of the module, on the device."""
    activation_bytes: int = 0
    """Peak of a micro-batch's activations and temporary tensors, on the device."""
    levels: BackwardLevels | None = None
    """What gradients add to that, from a trace; without one, the largest gradient is there at the peak."""
    ahead: GatherSizes = field(default_factory=GatherSizes)
    """Only for stage 3: how far ahead weights are gathered, where they are."""
    gathered: int = 0
    """Most elements of weights that are gathered at once, from `gathering_as`; 0 means `largest_gathered`."""
    is_fp16: bool = False
    """Whether weights are fp16, whose gradients stage 3 looks through for overflows before it steps."""

    def __post_init__(self) -> None:
        if not self.trained:
            raise ValueError("`parameters` holds none that is trained.")
        if self.on_disk and self.sizes is None:
            raise ValueError("`sizes` is needed with anything on disk: pass those of `infinity_sizes`.")

    @classmethod
    def with_our_sizes(
        cls,
        parameters: Sequence[ParameterInfo],
        stage: int,
        world_size: int,
        itemsize: int,
        zero: Mapping[str, Any] | None = None,
        pipeline: bool = False,
        params_in_host: int = 0,
        **options: Any,
    ) -> DeepSpeedRun:
        """Describe a run with the buffer sizes that our strategies set where the user sets none.

        Args:
            parameters: As the field of that name.
            stage: As the field of that name.
            world_size: As the field of that name.
            itemsize: As the field of that name.
            zero: Sizes that the user has set, as in the `zero_optimization` section.
            pipeline: With states on disk, whether the next and the last sub-group are moved while one is stepped.
            params_in_host: With parameters on disk, elements of them that stay in host memory.
            **options: Other fields.
        """
        distinct = [p for p in parameters if not p.shared_with]
        model = ModelSizes(sum(p.numel for p in distinct), max((p.numel for p in distinct), default=0))
        zero = zero_sizes({**(zero or {}), "stage": stage}, model, world_size)
        sizes = None
        if "nvme" in (options.get("offload_optimizer"), options.get("offload_parameters")):
            aio = AioSettings()
            swapped = Counter(  # counted by the module that owns them
                p.name.rpartition(".")[0]
                for p in parameters
                if p.numel // world_size * itemsize >= aio.min_swapped_bytes
            )
            groups = [[p.numel for p in distinct if p.trainable]]
            per_module = max(swapped.values(), default=0)
            sizes = infinity_sizes(
                groups,
                world_size,
                itemsize,
                aio,
                pipeline_read=pipeline,
                pipeline_write=pipeline,
                params_per_module=per_module,
                max_in_cpu=params_in_host,
            )
        return cls(
            parameters,
            stage,
            world_size,
            itemsize,
            bucket_size=zero["reduce_bucket_size"],
            sub_group_size=zero.get("sub_group_size", 0),
            sizes=sizes,
            ahead=_gather_sizes(zero, options.get("offload_parameters") == "nvme"),
            **options,
        )

    def gathering_as(self, profile: ModelProfile) -> DeepSpeedRun:
        """The run with the weights that stage 3 gathers where modules run as in a trace.

        A single rank on the CPU has all of them, and uses them in place.
        """
        in_place = self.on_cpu and self.world_size == 1
        if self.stage < 3 or in_place or profile.calls_itself or not self.ahead.prefetch:
            return self
        return replace(self, gathered=int(gathered_levels(profile, self.ahead).max(initial=0)))

    @property
    def on_disk(self) -> bool:
        """Whether anything is kept on disk."""
        return "nvme" in (self.offload_optimizer, self.offload_parameters)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Elements of each trained parameter, tied ones once."""
        return tuple(p.numel for p in self.parameters if p.trainable and not p.shared_with)

    @cached_property
    def whole(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(p.numel for p in self.parameters if not p.shared_with)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(p.numel for p in self.parameters)

    @cached_property
    def largest_gathered(self) -> int:
        """Elements of the largest parameter that stage 3 doesn't keep whole."""
        return max((p.numel for p in self.parameters if p.numel > PERSISTENT_NUMEL), default=0)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """This rank's elements of each trained parameter."""
        return tuple(-(-numel // self.world_size) for numel in self.trained)

    @cached_property
    def share(self) -> int:
        """Trained elements that this rank keeps states of."""
        return sum(self.shares)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where the parameters of each rank's share begin and end among the trained elements, in stages 1 and 2.

        These stages cut all parameters, one after the other, into equal parts. A parameter across a cut is a whole one
        of both ranks (`get_partition_info`). Several groups of the optimizer, each cut by itself, count as one.
        """
        stops = list(accumulate(self.trained))
        size = -(-stops[-1] // self.world_size)
        spans = []
        for start in range(0, stops[-1], size):
            inside = [
                (stop - numel, stop)
                for numel, stop in zip(self.trained, stops, strict=True)
                if stop > start and stop - numel < start + size
            ]
            spans.append((inside[0][0], inside[-1][1]))
        return tuple(spans)

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """Elements of the whole parameters of the rank that has most of them, in stages 1 and 2: see `spans`."""
        first, last = max(self.spans, key=lambda span: span[1] - span[0])
        stops = accumulate(self.trained)
        return tuple(n for n, stop in zip(self.trained, stops, strict=True) if first < stop <= last)

    @cached_property
    def persistent(self) -> int:
        """Elements of the parameters that stage 3 keeps whole beside the shares; a single rank's share is whole."""
        if self.stage < 3 or self.world_size == 1:
            return 0
        return sum(p.numel for p in self.parameters if p.numel <= PERSISTENT_NUMEL and not p.shared_with)

    def scattered_copies(self, sizes: Sequence[int]) -> int:
        """Bytes of the copies of a bucket that exist while stage 3 reduces it.

        `reduce_scatter_coalesced` makes a flat one with every gradient filled up to equal shares, unless there is only
        one that needs no filling, and gloo works on another.

        Args:
            sizes: Bytes of each gradient in the bucket.
        """
        if self.stage < 3 or self.world_size == 1:
            return 0
        share = self.world_size * self.itemsize
        filled = sum(-(-size // share) * share for size in sizes)
        return filled * ((len(sizes) > 1 or filled > sum(sizes)) + self.on_cpu)

    @property
    def stepped(self) -> int:
        """Elements stepped at once."""
        if self.stage < 3:
            return self.share
        if self.sizes is not None:
            return self.sizes.largest_sub_group
        if not self.sub_group_size:
            return self.share
        return min(self.share, self.sub_group_size + self.largest // self.world_size)


def _gather_sizes(zero: Mapping[str, Any], from_disk: bool) -> GatherSizes:
    """How far ahead stage 3 gathers; `ZeroInfinityStrategy` has it gather nothing ahead from disk."""
    if from_disk or zero["stage"] < 3:
        return GatherSizes()
    return GatherSizes(
        zero["stage3_prefetch_bucket_size"],
        zero["stage3_max_live_parameters"],
        zero["stage3_max_reuse_distance"],
        PERSISTENT_NUMEL,
    )


@dataclass(frozen=True)
class DeepSpeedMemory:
    """Bytes of one rank by tier, at each moment of a run."""

    moments: Mapping[str, MemoryBreakdown]
    """`kept` is what stays between steps; `build` of the model, `setup` of the engine, `passes` (forward and backward)
    and `update` (the first step or any other, whichever takes more) are peaks."""
    around_passes: MemoryBreakdown
    """`kept`, plus the most buckets, gathered weights and reduced gradients that exist at the same time as a
    micro-batch's activations. The memory of libraries is left out."""
    on_cpu: bool = False
    unfilled_bytes: int = 0
    """What `passes` counts of tensors that no page of host memory is taken for; only on the CPU."""

    @property
    def kept(self) -> MemoryBreakdown:
        """What stays between steps."""
        return self.moments["kept"]

    @property
    def host_tiers(self) -> tuple[Tier, ...]:
        """Tiers that are host memory: pinned and pageable, and the device's if that is the CPU."""
        host = (Tier.PINNED_HOST, Tier.HOST)
        return (*host, Tier.DEVICE) if self.on_cpu else host

    @property
    def host_peak(self) -> tuple[str, MemoryBreakdown]:
        """The moment with the most host memory: its name and its breakdown, of pages that are used."""
        used = {name: self._used(name) for name in self.moments}
        name = max(used, key=lambda moment: self._on_host(used[moment]))
        return name, used[name]

    @property
    def host_peak_bytes(self) -> int:
        """The most host memory that a rank takes."""
        return self._on_host(self.host_peak[1])

    @property
    def device_peak_bytes(self) -> int:
        """The most device memory that a rank's tensors take, without what an allocator adds."""
        return max(moment.total(Tier.DEVICE) for moment in self.moments.values())

    def once_built(self) -> DeepSpeedMemory:
        """The memory of a run whose model is already built: without the moment `build`."""
        later = {name: moment for name, moment in self.moments.items() if name != "build"}
        return replace(self, moments=later)

    def _used(self, name: str) -> MemoryBreakdown:
        moment = self.moments[name]
        if name != "passes" or not self.unfilled_bytes:
            return moment
        return moment.replace(Category.TEMPORARY, moment.get(Category.TEMPORARY) - self.unfilled_bytes)

    def _on_host(self, moment: MemoryBreakdown) -> int:
        return sum(moment.total(tier) for tier in self.host_tiers)


def deepspeed_memory(run: DeepSpeedRun) -> DeepSpeedMemory:
    """Memory of one rank, from building the model on."""
    kept = _kept(run)
    buckets, reduced = _buckets(run), _reduced(run)
    met = {
        Category.GRADIENT: max(reduced, _accumulated(run, reduced)),
        Category.COMMUNICATION: buckets + _gathered(run),
    }
    residue = _residue(run)
    moments: dict[str, MemoryBreakdown] = {
        "build": _build(run),
        "setup": _setup(run),
        "kept": kept + residue,
        "passes": kept + residue + _passes(run, buckets, reduced),
        "update": kept + residue + _update(run),
    }
    code = LIBRARIES_BYTES + ASYNC_IO_BYTES * (run.sizes is not None)
    libraries = MemoryBreakdown.on(Tier.HOST, {Category.RUNTIME_CONTEXT: code})
    by_moment = {name: moment + libraries for name, moment in moments.items()}
    return DeepSpeedMemory(by_moment, kept + MemoryBreakdown.device(met), run.on_cpu, _unfilled(run))


def checkpoint_bytes(run: DeepSpeedRun) -> int:
    """Bytes on disk that a checkpoint adds per rank if the optimizer is on disk: copies of masters and states."""
    return sum(size for _, _, size in _states_by_sub_group(run))


# --- what stays -----------------------------------------------------------------------------------------------------


def _kept(run: DeepSpeedRun) -> MemoryBreakdown:
    """Weights, masters, states and gradients on every tier, and the buffers on the device that are never freed.

    A stage-3 rank keeps its reduce bucket (`ipg_buckets`, made in `_setup_for_real_optimizer`); lower stages make
    buckets for every backward pass. DeepSpeed doesn't control NCCL's memory: `NCCL_BYTES` is an assumption.
    """
    bucket = run.bucket_size * run.itemsize * (run.stage == 3)
    own = MemoryBreakdown.device({Category.BUFFER: run.buffer_bytes, Category.COMMUNICATION: bucket + _nccl(run)})
    if run.sizes is not None:
        return own + _with_disk(run)
    return own + (_in_memory(run) if run.stage == 3 else _below_stage_3(run))


def _nccl(run: DeepSpeedRun) -> int:
    return NCCL_BYTES if run.world_size > 1 and not run.on_cpu else 0


def _in_memory(run: DeepSpeedRun) -> MemoryBreakdown:
    """Stage 3 without disk.

    - Weights: `lp_param_buffer` on the device, or `param_groups_fp16_flat_cpu_memory` on the host, which is page-locked
      whatever `pin_memory` says. With `pin_memory` the partitions that `zero.Init` locked one by one also stay locked
      after their data moved to that buffer: 4 bytes per parameter where 2 are in use (measured).
    - Masters: `fp32_partitioned_groups_flat`, pageable even with `pin_memory`. They are a copy even of fp32 weights,
      as `tensor.device == self.device` compares a device with a string (measured).
    - Gradients: `grad_partitions_flat_buffer` in the weights' dtype, and if the optimizer is offloaded, the fp32
      gradient of every sub-group; both are locked with `pin_memory`.
    """
    share, offloaded = run.share, run.offload_optimizer == "cpu"
    weights = -(-run.whole // run.world_size) * run.itemsize
    if run.offload_parameters == "none":
        kept = MemoryBreakdown.device({Category.PARAMETER: weights})
    else:
        kept = _on_host(run, Category.PARAMETER, [weights], locked=True)
        if run.pin_memory and not run.on_cpu:
            partitions = [-(-p.numel // run.world_size) * run.itemsize for p in run.parameters if not p.shared_with]
            kept += _on_host(run, Category.PARAMETER, partitions, locked=True)
    kept += MemoryBreakdown.device({Category.PARAMETER: run.persistent * run.itemsize})
    states = {Category.OPTIMIZER_STATE: round((_FP32 + run.state_bytes) * share)}
    kept += MemoryBreakdown.on(Tier.HOST if offloaded else Tier.DEVICE, states)
    if not offloaded:
        return kept + MemoryBreakdown.device({Category.GRADIENT: share * run.itemsize})
    groups = sub_groups(run.shares, run.sub_group_size or share)
    gradients = [share * run.itemsize, *(sum(group) * _FP32 for group in groups)]
    return kept + _on_host(run, Category.GRADIENT, gradients, run.pin_memory)


def _below_stage_3(run: DeepSpeedRun) -> MemoryBreakdown:
    """Stages 1 and 2: whole weights (`bit16_groups_flat`), a share of masters and states.

    If the optimizer is offloaded, these are on the host, and with `pin_memory` only the states are pageable:

    - masters (`single_partition_of_fp32_groups`) and their fp32 gradients,
    - new weights on their way back (`param_buffer_of_bit16_for_cpu_offload_groups`),
    - `temp_grad_buffer_for_cpu_offload`, with the size of the largest parameter, and one like it on the device,
    - if micro-batches are accumulated, `accumulated_grads_in_cpu`: a buffer for each parameter of the rank, as large as
      the parameter even if the rank steps a part of it. Stage 1 accumulates on the device instead.
    """
    weights = MemoryBreakdown.device({Category.PARAMETER: run.whole * run.itemsize})
    masters, states = run.share * _FP32, round(run.state_bytes * run.share)
    if run.offload_optimizer == "none":
        return weights + MemoryBreakdown.device({Category.OPTIMIZER_STATE: masters + states})
    moved = run.largest * run.itemsize
    accumulated = [numel * run.itemsize for numel in run.owned] if run.accumulates and run.stage == 2 else []
    return (
        weights
        + MemoryBreakdown.device({Category.COMMUNICATION: moved})
        + MemoryBreakdown.on(Tier.HOST, {Category.OPTIMIZER_STATE: states})
        + _on_host(run, Category.OPTIMIZER_STATE, [masters], run.pin_memory)
        + _on_host(run, Category.GRADIENT, [masters, *accumulated], run.pin_memory)
        + _on_host(run, Category.COMMUNICATION, [run.share * run.itemsize, moved], run.pin_memory)
    )


def _on_host(run: DeepSpeedRun, category: Category, sizes: Sequence[int], locked: bool) -> MemoryBreakdown:
    """Buffers in host memory, given by their sizes in bytes.

    Parameter groups are counted as one buffer; usually there are a large and a small one.
    """
    if not locked or run.on_cpu:
        return MemoryBreakdown.on(Tier.HOST, {category: sum(sizes)})
    return MemoryBreakdown.pinned(category, sizes)


def _with_disk(run: DeepSpeedRun) -> MemoryBreakdown:
    """ZeRO-Infinity: tensors on disk, those too small to swap, and the buffers between (`runtime/swap_tensor`).

    Disk holds fp32 master weights, gradients and states of every sub-group, and the weights: 18 bytes per parameter
    with AdamW in bf16, 20 in fp32. DeepSpeed's own allocator locks the swap buffers without rounding their sizes.
    """
    assert run.sizes is not None
    pinned = run.sizes.optimizer_buffer_bytes * (run.offload_optimizer == "nvme")
    pinned += run.sizes.param_buffer_bytes * (run.offload_parameters == "nvme")
    buffers = MemoryBreakdown.on(Tier.PINNED_HOST, {Category.COMMUNICATION: pinned})
    return _weights_with_disk(run) + _states_by_sub_group(run) + _gradients_with_disk(run) + buffers


def _weights_with_disk(run: DeepSpeedRun) -> MemoryBreakdown:
    """Weights by tier. A tied weight was written to disk before it was tied, and its file stays.

    Small ones are whole on every rank, beside the shares (`persistent_parameters`, gathered after every step).
    """
    assert run.sizes is not None
    offloaded, sizes = run.offload_parameters == "nvme", run.sizes
    by_tier = dict.fromkeys(Tier, 0)
    for parameter in run.parameters:
        partition, tied = -(-parameter.numel // run.world_size), bool(parameter.shared_with)
        if not offloaded or parameter.numel <= PERSISTENT_NUMEL:
            by_tier[Tier.DEVICE] += partition * sizes.itemsize * (not tied)
        elif partition * sizes.itemsize >= sizes.aio.min_swapped_bytes:
            by_tier[Tier.DISK] += sizes.aio.aligned(partition, sizes.itemsize) * sizes.itemsize
        elif not tied:
            by_tier[Tier.HOST] += partition * sizes.itemsize
    by_tier[Tier.DEVICE] += run.persistent * sizes.itemsize
    in_host = min(sizes.max_in_cpu, run.share)  # `_create_param_groups_fp16_flat_cpu_memory`
    by_tier[Tier.HOST] += in_host * sizes.itemsize * offloaded
    return MemoryBreakdown({(tier, Category.PARAMETER): size for tier, size in by_tier.items()})


def _states_by_sub_group(run: DeepSpeedRun) -> MemoryBreakdown:
    """Masters and states of each sub-group, on disk where it is large enough."""
    assert run.sizes is not None
    offloaded, sizes = run.offload_optimizer == "nvme", run.sizes
    by_tier = dict.fromkeys((Tier.DISK, Tier.HOST, Tier.DEVICE), 0)
    for numel in sizes.sub_groups:
        swapped = offloaded and numel * _FP32 >= sizes.aio.min_swapped_bytes
        stored = sizes.aio.aligned(numel, _FP32) if swapped else numel
        tier = Tier.DISK if swapped else Tier.HOST if offloaded else Tier.DEVICE
        by_tier[tier] += round((_FP32 + run.state_bytes) * stored)
    return MemoryBreakdown({(tier, Category.OPTIMIZER_STATE): size for tier, size in by_tier.items()})


def _gradients_with_disk(run: DeepSpeedRun) -> MemoryBreakdown:
    """One buffer in the weights' dtype for all gradients, and fp32 gradients for the step, on disk if large enough.

    The buffer (`grad_partitions_flat_buffer`) is on the device if the step is. A sub-group too small to be swapped
    keeps an fp32 gradient in memory (`initialize_optimizer_states`). What the others don't write to disk is there from
    backward to step only: see `_held`.
    """
    assert run.sizes is not None
    flat = run.share * run.itemsize
    if run.offload_optimizer != "nvme":
        return MemoryBreakdown.device({Category.GRADIENT: flat})
    step, least = run.sizes.aio.aligned(1, _FP32), run.sizes.aio.min_swapped_bytes
    disk = sum(numel // step * step * _FP32 for numel in run.shares if numel * _FP32 >= least)
    host = flat + _unswapped_groups(run) * _FP32
    return MemoryBreakdown({(Tier.HOST, Category.GRADIENT): host, (Tier.DISK, Category.GRADIENT): disk})


def _unswapped_groups(run: DeepSpeedRun) -> int:
    """Elements of the sub-groups that are too small for disk."""
    assert run.sizes is not None
    return sum(numel for numel in run.sizes.sub_groups if numel * _FP32 < run.sizes.aio.min_swapped_bytes)


def _residue(run: DeepSpeedRun) -> MemoryBreakdown:
    """Fragmentation by activations on the CPU: blocks too small to be mapped one by one leave holes in the heap."""
    left = run.activation_bytes // 3 if run.on_cpu else 0
    return MemoryBreakdown.on(Tier.HOST, {Category.FRAGMENTATION: left})


# --- what comes and goes --------------------------------------------------------------------------------------------


def _build(run: DeepSpeedRun) -> MemoryBreakdown:
    """Below stage 3 the whole model is built on the host in fp32, with a copy of the parameter being made."""
    elements = run.largest + (run.whole if run.stage < 3 else 0)
    return MemoryBreakdown.on(Tier.HOST, {Category.PARAMETER: elements * _FP32})


def _setup(run: DeepSpeedRun) -> MemoryBreakdown:
    """Below stage 3, flat weights are made in addition to the weights, and masters from a copy in the weights' dtype.

    Flat weights are made on an accelerator only if they fit there (`flatten_on_accelerator`). The copy of a rank's
    share is always made there (`weights_partition`, cloned before it goes to the host and is widened).
    """
    own = {Category.BUFFER: run.buffer_bytes, Category.COMMUNICATION: _nccl(run)}
    if run.stage == 3:
        return MemoryBreakdown.device(own)
    copies = 2 if run.on_cpu else 1
    widened = _FP32 if run.on_cpu or run.offload_optimizer == "none" else 0
    device = copies * run.whole * run.itemsize + run.share * (run.itemsize + widened)
    return MemoryBreakdown.device({**own, Category.PARAMETER: device})


def _buckets(run: DeepSpeedRun) -> int:
    """Bytes of the two buckets (for `overlap_comm`) that stages 1 and 2 make for a backward pass, whole from the start.

    A model smaller than they are doesn't fill them: see `_unfilled`.
    """
    return 2 * run.bucket_size * run.itemsize * (run.stage < 3)


def _unfilled(run: DeepSpeedRun) -> int:
    """Bytes of the buckets that no gradient fills. They are tensors, but on the CPU no page of them takes memory."""
    return max(0, _buckets(run) - sum(run.trained) * run.itemsize) if run.on_cpu else 0


def _reduced(run: DeepSpeedRun) -> int:
    """Most bytes of a rank's gradients that stages 1 and 2 keep on the device until the step (`grads_in_partition`).

    They are those of whole parameters, of which the rank may step a part only.
    """
    return 0 if run.stage == 3 else _kept_of(run, sum(run.trained) * run.itemsize)


def _reducing(run: DeepSpeedRun, levels: BackwardLevels, earlier: int) -> int:
    """Highest bytes from the first reduced bucket on, with the gradients that a rank keeps.

    Once it is, the buffer for all gradients that a rank keeps is made, if one of these is in the bucket: on the last
    rank, whose parameters are the last, when backward has just begun.

    Args:
        run: The run, of stage 1 or 2.
        levels: Its backward passes.
        earlier: Bytes of gradients of earlier micro-batches that the levels don't count.
    """
    highest = 0
    for reductions in levels.reductions:
        reduced = held = 0
        for size, now, later in reductions:
            highest = max(highest, earlier + held + now + _flat_copy(run, reduced, reduced + size))
            reduced += size
            held = _kept_of(run, reduced)
            highest = max(highest, earlier + held + later)
    return highest


def _flat_copy(run: DeepSpeedRun, before: int, after: int) -> int:
    """Bytes of the copy in which a bucket of stages 1 and 2 is reduced: of all of it, or none.

    `average_tensor` cuts a bucket where the share of one rank ends and that of another begins. All parts are reduced
    together (`use_multi_rank_bucket_allreduce`, on by default), in a flat copy (`allreduce_bucket`): torch's
    `_flatten_dense_tensors`, which of a single part makes a view. So a bucket without a cut is reduced in place.

    Args:
        run: The run.
        before: Bytes reduced before this bucket, from the last parameter on.
        after: The same with this bucket.
    """
    whole, share = sum(run.trained) * run.itemsize, -(-sum(run.trained) // run.world_size) * run.itemsize
    first, last = max(0, whole - after), whole - before
    return last - first if first // share < (last - 1) // share else 0


def _kept_of(run: DeepSpeedRun, reduced: int) -> int:
    """Most bytes of gradients that a rank keeps once so many bytes are reduced, from the last parameter on."""
    if run.offload_optimizer != "none":
        return 0
    first = sum(run.trained) - reduced // run.itemsize
    elements: int = max((stop - start for start, stop in run.spans if stop > first), default=0)
    return elements * run.itemsize


def _accumulated(run: DeepSpeedRun, reduced: int) -> int:
    """Bytes of gradients of earlier micro-batches, beside a new buffer for those of the last one.

    Stage 1 reduces in the last micro-batch only, and keeps whole gradients until then, wherever the optimizer is.
    """
    if not run.accumulates or run.stage == 3:
        return 0
    return sum(run.trained) * run.itemsize if run.stage == 1 else reduced


def _gathered(run: DeepSpeedRun) -> int:
    """Most bytes of gathered weights in stage 3, in addition to the shares.

    A single rank on the CPU uses its share in place, unless that is in a swap buffer. Where nothing is gathered ahead,
    the largest parameter that isn't whole anyway is the most that is gathered at once.
    """
    if run.stage < 3:
        return 0
    from_disk = run.offload_parameters == "nvme"
    if run.on_cpu and run.world_size == 1 and not from_disk:
        return 0
    return (run.gathered or run.largest_gathered) * run.itemsize


def _passes(run: DeepSpeedRun, buckets: int, reduced: int) -> MemoryBreakdown:
    """The larger of two moments: the start of backward, with all activations, or reducing the largest gradient.

    Both need that gradient, or two of them and their sum if the parameter is tied, which a partitioned module doesn't
    show. The norm of gradients that go to the host is computed before, in fp64 (`set_norm_for_param_grad_in_gpu`).
    """
    gradient, offloaded = run.largest * run.itemsize, run.offload_optimizer != "none"
    levels = run.levels or _untraced(run)
    if run.stage < 3:
        norm = min(run.largest, run.share) * _FP64 * offloaded
        earlier = _accumulated(run, reduced) if run.stage == 2 else 0  # levels have those of stage 1
        widest = max(earlier + levels.highest_bytes, _reducing(run, levels, earlier), reduced + norm)
        return MemoryBreakdown.device({Category.TEMPORARY: buckets + widest})
    norm = min(run.largest // run.world_size, _NORM_CHUNK) * _FP64 * offloaded
    copied = gradient if run.world_size > 1 or run.offload_parameters == "nvme" else 0  # `reduce_scatter_coalesced`
    start = _gathered(run) + max(levels.highest_bytes, levels.scattered_bytes)
    widest = max(start, 3 * gradient, copied + norm)
    most = max(run.shares)
    held = _held(run, [numel for numel in run.shares if numel < most])
    return MemoryBreakdown.device({Category.TEMPORARY: widest}) + held


def _untraced(run: DeepSpeedRun) -> BackwardLevels:
    """Without a trace, all activations and the largest gradient are there when the first bucket is reduced."""
    bucket, level = run.bucket_size * run.itemsize, run.largest * run.itemsize + run.activation_bytes
    level += _accumulated(run, 0)
    return BackwardLevels(level, ((Reduction(bucket, level, level),),))


def _held(run: DeepSpeedRun, shares: Sequence[int]) -> MemoryBreakdown:
    """fp32 gradients that stay in memory from backward until their sub-group is stepped (`unswapped_gradients`).

    These are small ones, and those that don't fill an aligned piece of a file: the rest is a view
    (`_adjust_for_misaligned_lengths`), which keeps the whole gradient alive. `_offload_grad_partition_at_boundary`
    makes them with `to`, on the device: of fp32 gradients on the CPU that is no copy, but a view of the buffer for all.
    """
    if run.sizes is None or run.offload_optimizer != "nvme" or (run.on_cpu and run.itemsize == _FP32):
        return MemoryBreakdown()
    step, least = run.sizes.aio.aligned(1, _FP32), run.sizes.aio.min_swapped_bytes
    misaligned = sum(n for n in shares if n % step and n * _FP32 >= least)
    small = sum(n for n in shares if n * _FP32 < least)
    held = misaligned + max(0, small - _unswapped_groups(run))
    return MemoryBreakdown.device({Category.GRADIENT: held * _FP32})


def _update(run: DeepSpeedRun) -> MemoryBreakdown:
    """Peak of the first step or of any other, whichever takes more.

    With states on disk, the optimizer makes those of its first step in new memory, one sub-group at a time. On the
    device, gradients are flattened and widened to fp32, and freed before the optimizer takes its scratch memory; their
    norm is computed in fp64. Only gloo needs room to gather the new weights of stages 1 and 2: NCCL's
    `all_gather_into_tensor` writes them in place. Stage 3 looks for overflows of fp16 with `torch.isinf`, which makes
    absolute values and a mask of all gradients of a rank at once, where they are.
    """
    checked = run.share * (_FP16 + 1) if run.is_fp16 and run.stage == 3 else 0
    check = MemoryBreakdown.on(Tier.HOST, {Category.TEMPORARY: checked})
    if run.offload_optimizer == "nvme":
        states = {Category.OPTIMIZER_STATE: round(run.state_bytes * run.stepped)}
        on_host = MemoryBreakdown.on(Tier.HOST, states) + _held(run, run.shares)
        return max(on_host, check, key=lambda moment: moment.total(Tier.HOST))
    gathered = run.whole * run.itemsize if run.world_size > 1 and run.stage < 3 and run.on_cpu else 0
    if run.offload_optimizer == "cpu":
        return MemoryBreakdown.device({Category.COMMUNICATION: gathered}) + check
    widened = run.itemsize + (_FP32 if run.itemsize != _FP32 else 0)
    stepping = run.stepped * (_FP32 + run.scratch_bytes)
    if run.stage == 3:
        norm = -(-run.largest // run.world_size) * _FP64
        size = max(norm, run.stepped * widened, stepping, checked)
    else:
        flat = _reduced(run)
        norm = min(run.largest, run.share) * _FP64
        size = max(flat + run.share * widened, flat + norm, gathered, stepping)
    return MemoryBreakdown.device({Category.TEMPORARY: size})
