"""What DeepSpeed keeps on one rank, by tier and moment: the one model behind plans, preflights and host checks.

Weights, gradients and optimizer states by tier, and the buffers whose sizes the configuration sets. On the CPU, device
and host memory are one and add up. Predictions are within 5 % of every committed run of DeepSpeed 0.19.8: the peaks of
ranks (`benchmarks/results/sharded_traces_cpu.json`) and of host memory (`offload_host_memory.json`), tensors between
steps (`strategies_cpu.json`), and page-locked memory (`deepspeed_buffers.json`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from lightning_memfit.estimate.deepspeed_sizes import InfinitySizes, sub_groups
from lightning_memfit.memory import MIB, Category, MemoryBreakdown, Tier
from lightning_memfit.memory.conversion import bytes_by_block
from lightning_memfit.memory.parameters import ParameterInfo

OffloadTarget = Literal["none", "cpu", "nvme"]

NCCL_BYTES = 512 * MIB
"""What NCCL keeps on a device beyond tensors; an assumption, as it depends on topology and version."""

LIBRARIES_BYTES = 76 * MIB
"""Memory that a process takes between the preflight and its second step for code, threads and Python objects: kernels
that are loaded or compiled when first used, hooks, the engine. Measured, see `benchmarks/host_memory`."""

ASYNC_IO_BYTES = 10 * MIB
"""Memory that asynchronous I/O takes for its kernels, queues and threads."""

PERSISTENT_NUMEL = 100_000
"""Parameters up to this size stay on the device (`stage3_param_persistence_threshold`, DeepSpeed's default)."""

_FP32, _FP64 = 4, 8


@dataclass(frozen=True)
class DeepSpeedRun:
    """The facts about a run that decide the memory of its ranks. Sizes are in elements unless the name says bytes.

    Raises:
        ValueError: If nothing is trained, or disk is used without `sizes`.
    """

    parameters: Sequence[ParameterInfo]
    """All parameters at their full size, from `parameter_table`."""
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
    passes_bytes: int | None = None
    """Peak of forward and backward beyond buckets and what stays, from a trace (`zero_rank`). Without one, activations
    and the largest gradient are there at the same time."""
    live: int = 0
    """Only for stage 3: weights that are gathered ahead (`stage3_max_live_parameters`); 0 means one at a time."""
    is_fp16: bool = False
    """Whether weights are fp16, whose gradients stage 3 looks through for overflows before it steps."""

    def __post_init__(self) -> None:
        if not self.trained:
            raise ValueError("`parameters` holds none that is trained.")
        if self.sizes is None and "nvme" in (self.offload_optimizer, self.offload_parameters):
            raise ValueError("`sizes` is needed with anything on disk: pass those of `infinity_sizes`.")

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
    def shares(self) -> tuple[int, ...]:
        """This rank's elements of each trained parameter."""
        return tuple(-(-numel // self.world_size) for numel in self.trained)

    @cached_property
    def share(self) -> int:
        """Trained elements that this rank keeps states of."""
        return sum(self.shares)

    @cached_property
    def owned(self) -> int:
        """Elements of the whole parameters that the rank with most of them steps, in stages 1 and 2.

        These stages cut all parameters, one after the other, into equal parts. A parameter across a cut is a whole one
        of both ranks (`get_partition_info`). Several groups of the optimizer, each cut by itself, count as one.
        """
        stops = list(accumulate(self.trained))
        size = -(-stops[-1] // self.world_size)
        return max(
            sum(n for n, stop in zip(self.trained, stops, strict=True) if start < stop and stop - n < start + size)
            for start in range(0, stops[-1], size)
        )

    @cached_property
    def persistent(self) -> int:
        """Elements of the parameters that stage 3 keeps whole beside the shares; a single rank's share is whole."""
        small = sum(p.numel for p in self.parameters if p.numel <= PERSISTENT_NUMEL and not p.shared_with)
        return small * (self.stage == 3 and self.world_size > 1)

    @cached_property
    def gathered(self) -> int:
        """Most elements of weights that stage 3 has gathered at once, in addition to the shares.

        A single rank on the CPU uses its share in place, unless that is in a swap buffer.
        """
        if self.stage < 3 or (self.on_cpu and self.world_size == 1 and self.offload_parameters != "nvme"):
            return 0
        large = [p.numel for p in self.parameters if p.numel > PERSISTENT_NUMEL and not p.shared_with]
        return min(sum(large), max(self.live, *large, 0))

    @cached_property
    def gathered_in_recomputation(self) -> int:
        """The same while blocks are recomputed, with all weights of one (`torch.utils.checkpoint` keeps them)."""
        large = [replace(p, itemsize=1) for p in self.parameters if p.numel > PERSISTENT_NUMEL]
        blocks = [size for name, size in bytes_by_block(large).items() if name]
        return max(self.gathered, *blocks, 0) if self.gathered else 0

    @property
    def stepped(self) -> int:
        """Elements stepped at once."""
        if self.stage == 3 and self.sizes is not None:
            return self.sizes.largest_sub_group
        if self.stage < 3 or not self.sub_group_size:
            return self.share
        return min(self.share, self.sub_group_size + self.largest // self.world_size)

    @property
    def kept_gradients(self) -> int:
        """Bytes of gradients that a rank has on the device until the step, in stages 1 and 2 (`averaged_gradients`)."""
        return self.owned * self.itemsize * (self.stage < 3 and self.offload_optimizer == "none")

    @property
    def earlier_gradients(self) -> int:
        """Most bytes of gradients of earlier micro-batches, beside a new buffer for those of the last one.

        Stage 1 reduces in the last micro-batch only, and keeps whole gradients until then, wherever the optimizer is.
        """
        if not self.accumulates or self.stage == 3:
            return 0
        return self.kept_gradients if self.stage == 2 else sum(self.trained) * self.itemsize

    def copied(self, before: int, after: int) -> int:
        """Bytes of the copies in which a bucket is reduced.

        Stages 1 and 2 copy a bucket that has parts of two ranks, and reduce any other in place (`allreduce_bucket`).
        Stage 3 has a flat copy (`reduce_scatter_coalesced`), and gloo works on another.
        """
        if self.stage == 3:
            return (after - before) * (self.world_size > 1) * (1 + self.on_cpu)
        every = sum(self.trained) * self.itemsize
        share = -(-every // self.world_size)
        return (after - before) * (max(0, every - after) // share < (every - before - 1) // share)


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
    offloads: bool = False
    """Whether anything is kept off the device."""

    @property
    def kept(self) -> MemoryBreakdown:
        """What stays between steps."""
        return self.moments["kept"]

    @property
    def host_tiers(self) -> tuple[Tier, ...]:
        """Tiers that are host memory: pinned and pageable, and the device's if that is the CPU."""
        return (Tier.PINNED_HOST, Tier.HOST) + (Tier.DEVICE,) * self.on_cpu

    @property
    def host_peak(self) -> tuple[str, MemoryBreakdown]:
        """The moment with the most host memory: its name and its breakdown."""
        return max(self.moments.items(), key=lambda item: self._on_host(item[1]))

    @property
    def host_peak_bytes(self) -> int:
        """The most host memory that a rank takes."""
        return self._on_host(self.host_peak[1])

    @property
    def device_peak_bytes(self) -> int:
        """The most device memory that a rank's tensors take, without what an allocator adds."""
        return max(moment.total(Tier.DEVICE) for moment in self.moments.values())

    def on_device(self, moment: MemoryBreakdown) -> MemoryBreakdown:
        """What a moment takes on the device, which on the CPU is all memory."""
        sizes = Counter[Category]()
        for tier in self.host_tiers if self.on_cpu else (Tier.DEVICE,):
            sizes.update(moment.by_category(tier))
        return MemoryBreakdown.device(sizes)

    @property
    def beside_device(self) -> MemoryBreakdown:
        """Host memory, at its own largest moment, and disk, if anything is offloaded."""
        tiers = {Tier.DISK} if self.on_cpu else {Tier.PINNED_HOST, Tier.HOST, Tier.DISK} if self.offloads else set()
        return MemoryBreakdown({key: size for key, size in self.host_peak[1].entries.items() if key[0] in tiers})

    def once_built(self) -> DeepSpeedMemory:
        """The memory of a run whose model is already built: without the moment `build`."""
        return replace(self, moments={name: moment for name, moment in self.moments.items() if name != "build"})

    def _on_host(self, moment: MemoryBreakdown) -> int:
        return sum(moment.total(tier) for tier in self.host_tiers)


def deepspeed_memory(run: DeepSpeedRun) -> DeepSpeedMemory:
    """Memory of one rank, from building the model on."""
    kept = _kept(run)
    buckets = 2 * run.bucket_size * run.itemsize * (run.stage < 3)  # two for `overlap_comm`, made for a backward pass
    met = {
        Category.GRADIENT: max(run.kept_gradients, run.earlier_gradients),
        Category.COMMUNICATION: buckets + run.gathered * run.itemsize,
    }
    # Below stage 3 the whole model is built on the host in fp32, with a copy of the parameter being made.
    built = (run.largest + run.whole * (run.stage < 3)) * _FP32
    # On the CPU, activations too small to be mapped one by one leave holes in the heap.
    stays = kept + MemoryBreakdown.on(Tier.HOST, {Category.FRAGMENTATION: run.activation_bytes // 3 * run.on_cpu})
    passes = MemoryBreakdown.device({Category.TEMPORARY: buckets + _passes(run)})
    moments: dict[str, MemoryBreakdown] = {
        "build": MemoryBreakdown.on(Tier.HOST, {Category.PARAMETER: built}),
        "setup": _setup(run),
        "kept": stays,
        "passes": stays + passes + _unswapped(run),
        "update": stays + _update(run) + _unswapped(run),
    }
    code = LIBRARIES_BYTES + ASYNC_IO_BYTES * (run.sizes is not None)
    libraries = MemoryBreakdown.on(Tier.HOST, {Category.RUNTIME_CONTEXT: code})
    with_libraries = {name: moment + libraries for name, moment in moments.items()}
    offloads = {run.offload_optimizer, run.offload_parameters} != {"none"}
    return DeepSpeedMemory(with_libraries, kept + MemoryBreakdown.device(met), run.on_cpu, offloads)


# --- what stays -----------------------------------------------------------------------------------------------------


def _kept(run: DeepSpeedRun) -> MemoryBreakdown:
    """Weights, masters, states and gradients on every tier, and the buffers on the device that are never freed.

    A stage-3 rank keeps its reduce bucket; lower stages make buckets for every backward pass.
    """
    bucket = run.bucket_size * run.itemsize * (run.stage == 3)
    own = {Category.BUFFER: run.buffer_bytes, Category.COMMUNICATION: bucket + _nccl(run)}
    own[Category.PARAMETER] = (run.persistent if run.stage == 3 else run.whole) * run.itemsize
    if run.sizes is not None:
        return MemoryBreakdown.device(own) + _with_disk(run, run.sizes)
    return MemoryBreakdown.device(own) + (_stage_3(run) if run.stage == 3 else _below_stage_3(run))


def _nccl(run: DeepSpeedRun) -> int:
    return NCCL_BYTES if run.world_size > 1 and not run.on_cpu else 0


def _stage_3(run: DeepSpeedRun) -> MemoryBreakdown:
    """Stage 3 without disk: shares of weights, fp32 masters and states, and gradients in the weights' dtype.

    Offloaded weights are page-locked whatever `pin_memory` says. With it, the partitions that `zero.Init` locked one by
    one also stay locked: 4 bytes per parameter where 2 are in use. Masters are pageable. An offloaded optimizer has
    gradients once more in fp32, by sub-group, which `pin_memory` locks.
    """
    masters = {Category.OPTIMIZER_STATE: round((_FP32 + run.state_bytes) * run.share)}
    if run.offload_optimizer == "none":
        kept = MemoryBreakdown.device({**masters, Category.GRADIENT: run.share * run.itemsize})
    else:
        groups = [sum(group) * _FP32 for group in sub_groups(run.shares, run.sub_group_size or run.share)]
        gradients = _on_host(run, Category.GRADIENT, [run.share * run.itemsize, *groups], run.pin_memory)
        kept = MemoryBreakdown.on(Tier.HOST, masters) + gradients
    partitions = [-(-p.numel // run.world_size) * run.itemsize for p in run.parameters if not p.shared_with]
    if run.offload_parameters == "none":
        return kept + MemoryBreakdown.device({Category.PARAMETER: sum(partitions)})
    one_by_one = partitions if run.pin_memory and not run.on_cpu else []
    return kept + _on_host(run, Category.PARAMETER, [sum(partitions), *one_by_one], locked=True)


def _below_stage_3(run: DeepSpeedRun) -> MemoryBreakdown:
    """Stages 1 and 2: a share of masters and states.

    If the optimizer is offloaded, these are on the host with fp32 gradients, the new weights on their way back, a
    buffer for the largest gradient, and in stage 2 the gradients of earlier micro-batches of whole parameters. With
    `pin_memory` only the states are pageable.
    """
    masters, states = run.share * _FP32, round(run.state_bytes * run.share)
    if run.offload_optimizer == "none":
        return MemoryBreakdown.device({Category.OPTIMIZER_STATE: masters + states})
    moved = run.largest * run.itemsize
    accumulated = run.owned * run.itemsize * (run.accumulates and run.stage == 2)
    return (
        MemoryBreakdown.device({Category.COMMUNICATION: moved})
        + MemoryBreakdown.on(Tier.HOST, {Category.OPTIMIZER_STATE: states})
        + _on_host(run, Category.OPTIMIZER_STATE, [masters], run.pin_memory)
        + _on_host(run, Category.GRADIENT, [masters, accumulated], run.pin_memory)
        + _on_host(run, Category.COMMUNICATION, [run.share * run.itemsize, moved], run.pin_memory)
    )


def _on_host(run: DeepSpeedRun, category: Category, sizes: Sequence[int], locked: bool) -> MemoryBreakdown:
    """Buffers in host memory by their sizes in bytes, those of several parameter groups as one."""
    if not locked or run.on_cpu:
        return MemoryBreakdown.on(Tier.HOST, {category: sum(sizes)})
    return MemoryBreakdown.pinned(category, sizes)


def _with_disk(run: DeepSpeedRun, sizes: InfinitySizes) -> MemoryBreakdown:
    """ZeRO-Infinity: tensors on disk, those too small for it, and the page-locked buffers between.

    Disk holds fp32 masters, gradients and states, and the weights: 18 bytes per parameter with AdamW in bf16, 20 in
    fp32. All gradients have a buffer in the weights' dtype, where the step is. A tied weight was written before it was
    tied, and its file stays.
    """
    from_disk, least = run.offload_optimizer == "nvme", sizes.aio.min_swapped_bytes
    found = Counter[tuple[Tier, Category]]()
    for parameter in run.parameters:
        partition = -(-parameter.numel // run.world_size) * run.itemsize
        tier = Tier.DISK if partition >= least else Tier.HOST
        if run.offload_parameters != "nvme" or parameter.numel <= PERSISTENT_NUMEL:
            tier = Tier.DEVICE
        found[tier, Category.PARAMETER] += partition * (tier is Tier.DISK or not parameter.shared_with)
    for numel in sizes.sub_groups:
        tier = (Tier.DISK if numel * _FP32 >= least else Tier.HOST) if from_disk else Tier.DEVICE
        found[tier, Category.OPTIMIZER_STATE] += round((_FP32 + run.state_bytes) * numel)
        found[tier, Category.GRADIENT] += _FP32 * numel * (tier is Tier.DISK)  # small ones: `_unswapped`
    found[Tier.HOST if from_disk else Tier.DEVICE, Category.GRADIENT] += run.share * run.itemsize
    found[Tier.PINNED_HOST, Category.COMMUNICATION] += sizes.optimizer_buffer_bytes * from_disk
    if run.offload_parameters == "nvme":
        found[Tier.HOST, Category.PARAMETER] += min(sizes.max_in_cpu, run.share) * run.itemsize
        found[Tier.PINNED_HOST, Category.COMMUNICATION] += sizes.param_buffer_bytes
    return MemoryBreakdown(dict(found))


# --- what comes and goes --------------------------------------------------------------------------------------------


def _setup(run: DeepSpeedRun) -> MemoryBreakdown:
    """Below stage 3, flat weights are made in addition to the weights, and masters from a copy of a rank's share.

    Flat weights are made on an accelerator only if they fit there (`flatten_on_accelerator`).
    """
    own = {Category.BUFFER: run.buffer_bytes, Category.COMMUNICATION: _nccl(run)}
    if run.stage < 3:
        widened = _FP32 * (run.on_cpu or run.offload_optimizer == "none")
        own[Category.PARAMETER] = (1 + run.on_cpu) * run.whole * run.itemsize + run.share * (run.itemsize + widened)
    return MemoryBreakdown.device(own)


def _passes(run: DeepSpeedRun) -> int:
    """Bytes on the device in forward and backward, beyond buckets and what stays.

    The norm of a gradient that goes to the host is computed before, beside a copy of it where weights are gathered.
    """
    gradient, norm = run.largest * run.itemsize, run.kept_gradients
    if run.offload_optimizer != "none":
        norm += _norm(run) + gradient * (run.stage == 3 and (run.world_size > 1 or run.offload_parameters == "nvme"))
    if run.passes_bytes is not None:
        return max(run.passes_bytes, norm)
    start = run.gathered * run.itemsize + run.activation_bytes
    full = run.copied(0, min(run.bucket_size, sum(run.trained)) * run.itemsize)
    reducing = full + run.activation_bytes * (run.stage < 3)
    return max(run.earlier_gradients + gradient + max(start, reducing), norm)


def _norm(run: DeepSpeedRun) -> int:
    """Bytes of a gradient in fp64, of which its norm is computed."""
    return _FP64 * (-(-run.largest // run.world_size) if run.stage == 3 else min(run.largest, run.share))


def _unswapped(run: DeepSpeedRun) -> MemoryBreakdown:
    """fp32 gradients that stay in memory from backward until their sub-group is stepped (`unswapped_gradients`).

    These are small ones, and those that don't fill an aligned piece of a file (`_adjust_for_misaligned_lengths`). On
    the CPU those of fp32 weights are views.
    """
    if run.sizes is None or run.offload_optimizer != "nvme" or (run.on_cpu and run.itemsize == _FP32):
        return MemoryBreakdown()
    aio = run.sizes.aio
    held = sum(n for n in run.shares if n * _FP32 < aio.min_swapped_bytes or n != aio.aligned(n, _FP32))
    return MemoryBreakdown.device({Category.GRADIENT: held * _FP32})


def _update(run: DeepSpeedRun) -> MemoryBreakdown:
    """Peak of the first step or of any other, whichever takes more.

    With states on disk, the optimizer makes those of its first step in new memory, one sub-group at a time. On the
    device, gradients are flattened and widened to fp32, and freed before the optimizer takes its scratch memory. Only
    gloo needs room to gather the new weights of stages 1 and 2. Stage 3 looks for overflows of fp16 in absolute values
    and a mask of all gradients of a rank at once, where they are.
    """
    checked = run.share * (run.itemsize + 1) * (run.is_fp16 and run.stage == 3)
    if run.offload_optimizer == "nvme":
        states = round(run.state_bytes * run.stepped)
        return MemoryBreakdown.on(Tier.HOST, {Category.OPTIMIZER_STATE: max(checked, states)})
    gathered = run.whole * run.itemsize * (run.world_size > 1 and run.stage < 3 and run.on_cpu)
    if run.offload_optimizer == "cpu":
        on_host = MemoryBreakdown.on(Tier.HOST, {Category.TEMPORARY: checked})
        return MemoryBreakdown.device({Category.COMMUNICATION: gathered}) + on_host
    flat = run.stepped * (run.itemsize + _FP32 * (run.itemsize != _FP32))
    widened = run.kept_gradients + max(_norm(run), flat)
    stepping = run.stepped * (_FP32 + run.scratch_bytes)
    return MemoryBreakdown.device({Category.TEMPORARY: max(widened, stepping, gathered, checked)})
