"""What DeepSpeed keeps on one rank, by tier and moment: the one model behind plans, preflights and host checks.

`DeepSpeedRun` describes a run, `deepspeed_memory` says what it takes. On the CPU device and host memory are one and add
up. Every formula names the buffer of DeepSpeed 0.19.8 that it counts, in `runtime/zero/stage_1_and_2.py`
(`DeepSpeedZeroOptimizer`, stages 1 and 2), `runtime/zero/stage3.py` (`DeepSpeedZeroOptimizer_Stage3`) and
`runtime/swap_tensor`. Held by tests against peaks of resident memory (`benchmarks/results/offload_host_memory.json`),
buffers one by one with what of them is page-locked (`deepspeed_buffers.json`), and tensors between two steps
(`strategies_cpu.json`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_memfit.estimate.deepspeed_sizes import (
    AioSettings,
    InfinitySizes,
    ModelSizes,
    infinity_sizes,
    sub_groups,
    zero_sizes,
)
from lightning_memfit.memory import MIB, Category, MemoryBreakdown, Tier
from lightning_memfit.profile.record import ParameterInfo

OffloadTarget = Literal["none", "cpu", "nvme"]

NCCL_BYTES = 512 * MIB
"""What NCCL keeps on a device beyond tensors; an assumption, as it depends on topology and version."""

LIBRARIES_BYTES = 80 * MIB
"""What a process takes between the preflight and its second step for code, threads and Python objects: kernels that are
loaded or compiled when first used, hooks, the engine. Measured, see `benchmarks/offload_host_memory`."""

ASYNC_IO_BYTES = 10 * MIB
"""The same for asynchronous I/O: its kernels, queues and threads."""

PERSISTENT_NUMEL = 100_000
"""Parameters up to this size stay on the device (`stage3_param_persistence_threshold`, DeepSpeed's default)."""

_FP32, _FP64 = 4, 8
_NORM_CHUNK = 250_000_000  # elements, `_constant_buffered_norm2`; stages 1 and 2 widen a gradient whole


@dataclass(frozen=True)
class DeepSpeedRun:
    """What of a run decides the memory of its ranks. Sizes are in elements unless the name says bytes.

    Raises:
        ValueError: If nothing is trained, or disk is used without `sizes`.
    """

    parameters: Sequence[ParameterInfo]
    """Whole ones, of `parameter_table` or `ModelShape`."""
    stage: int = 3
    world_size: int = 1
    itemsize: int = 2
    """Bytes per element of the weights and gradients."""
    state_bytes: float = 8
    """Bytes of optimizer states per trained element; those of AdamW, in fp32 whatever the weights are."""
    scratch_bytes: int = 0
    """Bytes per element that the optimizer's step needs on the device: 4 with `foreach`, none if it is fused."""
    offload_optimizer: OffloadTarget = "none"
    offload_parameters: OffloadTarget = "none"
    bucket_size: int = 0
    """`reduce_bucket_size`."""
    sub_group_size: int = 0
    """With stage 3 and nothing on disk; 0 is one sub-group."""
    live_parameters: int = 0
    """`stage3_max_live_parameters`: gathered at one time at most, beside those of the module that runs."""
    sizes: InfinitySizes | None = None
    """With anything on disk."""
    pin_memory: bool = False
    """Whether buffers on the host are page-locked. Some are in any case, and on the CPU only those for disk."""
    accumulates: bool = False
    """Whether an optimizer step takes more than one micro-batch."""
    on_cpu: bool = False
    """Whether the CPU is the device: a weight that is whole already is then used where it lies."""
    buffer_bytes: int = 0
    """Buffers of the module, on the device."""
    activation_bytes: int = 0
    """Peak of a micro-batch's activations and temporary tensors, on the device."""

    def __post_init__(self) -> None:
        if not self.trained:
            raise ValueError("`parameters` holds none that is trained.")
        if self.on_disk and self.sizes is None:
            raise ValueError("`sizes` is needed with anything on disk: pass those of `infinity_sizes`.")

    @classmethod
    def with_our_sizes(
        cls, parameters: Sequence[ParameterInfo], stage: int, world_size: int, itemsize: int, **options: Any
    ) -> DeepSpeedRun:
        """A run with the buffer sizes that our strategies set where the user sets none.

        Args:
            parameters: As the field of that name.
            stage: As the field of that name.
            world_size: As the field of that name.
            itemsize: As the field of that name.
            **options: Other fields.
        """
        distinct = [p for p in parameters if not p.shared_with]
        model = ModelSizes(sum(p.numel for p in distinct), max((p.numel for p in distinct), default=0))
        zero = zero_sizes({"stage": stage}, model, world_size)
        sizes = None
        if "nvme" in (options.get("offload_optimizer"), options.get("offload_parameters")):
            aio = AioSettings()
            swapped = Counter(  # by the module that owns them
                p.name.rpartition(".")[0]
                for p in parameters
                if p.numel // world_size * itemsize >= aio.min_swapped_bytes
            )
            groups = [[p.numel for p in distinct if p.trainable]]
            per_module = max(swapped.values(), default=0)
            sizes = infinity_sizes(groups, world_size, itemsize, aio, params_per_module=per_module)
        return cls(
            parameters,
            stage,
            world_size,
            itemsize,
            bucket_size=zero["reduce_bucket_size"],
            sub_group_size=zero.get("sub_group_size", 0),
            live_parameters=zero.get("stage3_max_live_parameters", 0),
            sizes=sizes,
            **options,
        )

    @property
    def on_disk(self) -> bool:
        """Whether anything is kept on disk."""
        return "nvme" in (self.offload_optimizer, self.offload_parameters)

    @property
    def trained(self) -> list[int]:
        """Elements of each trained parameter, tied ones once."""
        return [p.numel for p in self.parameters if p.trainable and not p.shared_with]

    @property
    def whole(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(p.numel for p in self.parameters if not p.shared_with)

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(p.numel for p in self.parameters)

    @property
    def shares(self) -> list[int]:
        """This rank's elements of each trained parameter."""
        return [-(-numel // self.world_size) for numel in self.trained]

    @property
    def share(self) -> int:
        """Trained elements that this rank keeps states of."""
        return sum(self.shares)

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


@dataclass(frozen=True)
class DeepSpeedMemory:
    """Bytes of one rank by tier, at each moment of a run."""

    moments: Mapping[str, MemoryBreakdown]
    """`kept` is what stays between steps; `build` of the model, `setup` of the engine, `passes` (forward and backward)
    and `update` (the first step or any other, whichever takes more) are peaks."""
    around_passes: MemoryBreakdown
    """What is kept, and the buckets, gathered weights and reduced gradients that a micro-batch's activations meet at
    most. Without what libraries take."""
    on_cpu: bool = False

    @property
    def kept(self) -> MemoryBreakdown:
        """What stays between steps."""
        return self.moments["kept"]

    @property
    def host_tiers(self) -> tuple[Tier, ...]:
        """Tiers that are host memory: pinned and pageable, and the device's where that is the CPU."""
        host = (Tier.PINNED_HOST, Tier.HOST)
        return (*host, Tier.DEVICE) if self.on_cpu else host

    @property
    def host_peak(self) -> tuple[str, MemoryBreakdown]:
        """The moment with most host memory: its name, and its bytes."""
        name = max(self.moments, key=lambda moment: self._on_host(self.moments[moment]))
        return name, self.moments[name]

    @property
    def host_peak_bytes(self) -> int:
        """The most host memory that a rank takes."""
        return self._on_host(self.host_peak[1])

    @property
    def device_peak_bytes(self) -> int:
        """The most device memory that a rank's tensors take, without what an allocator adds."""
        return max(moment.total(Tier.DEVICE) for moment in self.moments.values())

    def once_built(self) -> DeepSpeedMemory:
        """The moments that lie ahead of a run whose model is built."""
        later = {name: moment for name, moment in self.moments.items() if name != "build"}
        return DeepSpeedMemory(later, self.around_passes, self.on_cpu)

    def _on_host(self, moment: MemoryBreakdown) -> int:
        return sum(moment.total(tier) for tier in self.host_tiers)


def deepspeed_memory(run: DeepSpeedRun) -> DeepSpeedMemory:
    """What a rank takes from where the model is built on."""
    kept = _kept(run)
    buckets, reduced = _buckets(run), _reduced(run)
    met = {Category.GRADIENT: reduced, Category.COMMUNICATION: buckets + _gathered(run)}
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
    return DeepSpeedMemory(by_moment, kept + MemoryBreakdown.device(met), run.on_cpu)


def checkpoint_bytes(run: DeepSpeedRun) -> int:
    """Bytes on disk that a checkpoint adds per rank where the optimizer is on disk: masters and states, copied."""
    return sum(size for _, _, size in _states_by_sub_group(run))


# --- what stays -----------------------------------------------------------------------------------------------------


def _kept(run: DeepSpeedRun) -> MemoryBreakdown:
    """Weights, masters, states and gradients, wherever they are, and on the device buffers that are never freed.

    A stage-3 rank keeps its reduce bucket (`ipg_buckets`, made in `_setup_for_real_optimizer`); below, buckets are made
    for every backward pass. Nothing of NCCL is in DeepSpeed's hands: `NCCL_BYTES` is an assumption.
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
      whatever `pin_memory` says. With `pin_memory` the partitions that `zero.Init` locked one by one stay locked, too,
      after their data went to that buffer: 4 bytes per parameter where 2 are in use (measured).
    - Masters: `fp32_partitioned_groups_flat`, pageable even with `pin_memory`. With fp32 weights they are a copy all
      the same, as `tensor.device == self.device` compares a device with a string (measured).
    - Gradients: `grad_partitions_flat_buffer` in the weights' dtype, and where the optimizer is offloaded the fp32
      gradient of every sub-group; both locked with `pin_memory`.
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
    states = {Category.OPTIMIZER_STATE: round((_FP32 + run.state_bytes) * share)}
    kept += MemoryBreakdown.on(Tier.HOST if offloaded else Tier.DEVICE, states)
    if not offloaded:
        return kept + MemoryBreakdown.device({Category.GRADIENT: share * run.itemsize})
    groups = sub_groups(run.shares, run.sub_group_size or share)
    gradients = [share * run.itemsize, *(sum(group) * _FP32 for group in groups)]
    return kept + _on_host(run, Category.GRADIENT, gradients, run.pin_memory)


def _below_stage_3(run: DeepSpeedRun) -> MemoryBreakdown:
    """Stages 1 and 2: whole weights (`bit16_groups_flat`), a share of masters and states.

    Where the optimizer is offloaded, these are on the host, and only the states are pageable with `pin_memory`:

    - masters (`single_partition_of_fp32_groups`) and their fp32 gradients,
    - new weights on their way back (`param_buffer_of_bit16_for_cpu_offload_groups`),
    - `temp_grad_buffer_for_cpu_offload`, of the largest parameter's size, and one like it on the device,
    - where micro-batches are accumulated, `accumulated_grads_in_cpu`: a buffer for each parameter.
    """
    weights = MemoryBreakdown.device({Category.PARAMETER: run.whole * run.itemsize})
    masters, states = run.share * _FP32, round(run.state_bytes * run.share)
    if run.offload_optimizer == "none":
        return weights + MemoryBreakdown.device({Category.OPTIMIZER_STATE: masters + states})
    moved = run.largest * run.itemsize
    accumulated = [numel * run.itemsize for numel in run.shares] if run.accumulates else []
    return (
        weights
        + MemoryBreakdown.device({Category.COMMUNICATION: moved})
        + MemoryBreakdown.on(Tier.HOST, {Category.OPTIMIZER_STATE: states})
        + _on_host(run, Category.OPTIMIZER_STATE, [masters], run.pin_memory)
        + _on_host(run, Category.GRADIENT, [masters, *accumulated], run.pin_memory)
        + _on_host(run, Category.COMMUNICATION, [run.share * run.itemsize, moved], run.pin_memory)
    )


def _on_host(run: DeepSpeedRun, category: Category, sizes: Sequence[int], locked: bool) -> MemoryBreakdown:
    """Buffers in host memory, in bytes each.

    torch locks powers of two (`CachingHostAllocator`, `roundSize`): what a buffer doesn't use of its block is
    fragmentation. Parameter groups are counted as one buffer; there usually are one large and one small.
    """
    if not locked or run.on_cpu:
        return MemoryBreakdown.on(Tier.HOST, {category: sum(sizes)})
    unused = sum((1 << max(0, size - 1).bit_length()) - size for size in sizes if size)
    return MemoryBreakdown.on(Tier.PINNED_HOST, {category: sum(sizes), Category.FRAGMENTATION: unused})


def _with_disk(run: DeepSpeedRun) -> MemoryBreakdown:
    """ZeRO-Infinity: what is swapped, what is too small for it, and the buffers between (`runtime/swap_tensor`).

    Disk holds fp32 master weights, gradients and states of every sub-group, and the weights: 18 bytes per parameter
    with AdamW in bf16, 20 in fp32. Swap buffers are locked by DeepSpeed's own allocator, to the byte.
    """
    assert run.sizes is not None
    pinned = run.sizes.optimizer_buffer_bytes * (run.offload_optimizer == "nvme")
    pinned += run.sizes.param_buffer_bytes * (run.offload_parameters == "nvme")
    buffers = MemoryBreakdown.on(Tier.PINNED_HOST, {Category.COMMUNICATION: pinned})
    return _weights_with_disk(run) + _states_by_sub_group(run) + _gradients_with_disk(run) + buffers


def _weights_with_disk(run: DeepSpeedRun) -> MemoryBreakdown:
    """Weights by tier. A tied one was written before it was tied, and its file stays."""
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
    by_tier[Tier.HOST] += sizes.max_in_cpu * sizes.itemsize * offloaded
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
    """A buffer of the weights' dtype for all of them, and fp32 ones for the step: on disk where large enough.

    What doesn't fill an aligned piece of a file is kept in memory. Where the step is on the device, so is the buffer.
    """
    assert run.sizes is not None
    host, disk = run.share * run.itemsize, 0
    if run.offload_optimizer != "nvme":
        return MemoryBreakdown.device({Category.GRADIENT: host})
    step = run.sizes.aio.aligned(1, _FP32)
    for numel in run.shares:
        swapped = numel * _FP32 >= run.sizes.aio.min_swapped_bytes
        on_disk = numel // step * step if swapped else 0
        disk += on_disk * _FP32
        host += (numel - on_disk) * _FP32
    return MemoryBreakdown({(Tier.HOST, Category.GRADIENT): host, (Tier.DISK, Category.GRADIENT): disk})


def _residue(run: DeepSpeedRun) -> MemoryBreakdown:
    """Of activations on the CPU: blocks too small to be mapped one by one leave holes in the heap."""
    left = run.activation_bytes // 3 if run.on_cpu else 0
    return MemoryBreakdown.on(Tier.HOST, {Category.FRAGMENTATION: left})


# --- what comes and goes --------------------------------------------------------------------------------------------


def _build(run: DeepSpeedRun) -> MemoryBreakdown:
    """Below stage 3 the whole model is built on the host in fp32, the largest parameter with a copy as it is made."""
    elements = run.largest + (run.whole if run.stage < 3 else 0)
    return MemoryBreakdown.on(Tier.HOST, {Category.PARAMETER: elements * _FP32})


def _setup(run: DeepSpeedRun) -> MemoryBreakdown:
    """Below stage 3, flat weights are made beside the weights, and masters by way of a copy in the weights' dtype.

    On an accelerator flat weights are made there only if they find room (`flatten_on_accelerator`). The copy of a
    rank's share is made there in any case (`weights_partition`, cloned before it goes to the host and is widened).
    """
    own = {Category.BUFFER: run.buffer_bytes, Category.COMMUNICATION: _nccl(run)}
    if run.stage == 3:
        return MemoryBreakdown.device(own)
    copies = 2 if run.on_cpu else 1
    widened = _FP32 if run.on_cpu or run.offload_optimizer == "none" else 0
    device = copies * run.whole * run.itemsize + run.share * (run.itemsize + widened)
    return MemoryBreakdown.device({**own, Category.PARAMETER: device})


def _buckets(run: DeepSpeedRun) -> int:
    """Bytes of the two buckets (for `overlap_comm`) that stages 1 and 2 make for a backward pass.

    The CPU backs only those of their pages that gradients touch.
    """
    elements = 2 * run.bucket_size * (run.stage < 3)
    return (min(elements, run.whole) if run.on_cpu else elements) * run.itemsize


def _reduced(run: DeepSpeedRun) -> int:
    """Bytes of gradients that stages 1 and 2 keep on the device until the step: `averaged_gradients`.

    Stage 1 divides them when the last micro-batch is done, so that before they are whole.
    """
    if run.stage == 3 or run.offload_optimizer != "none":
        return 0
    return (sum(run.trained) if run.stage == 1 else run.share) * run.itemsize


def _gathered(run: DeepSpeedRun) -> int:
    """Bytes of whole weights beside the shares, while the largest parameter is in use, in stage 3.

    One rank on the CPU uses its share as it is, unless that lies in a swap buffer. Never more elements than the largest
    parameter's were available (`PartitionedParameterCoordinator.__n_available_params`, measured with one rank and two,
    tied and untied, and with live parameters of 18 times that): under Lightning the coordinator's trace is invalid in
    every step (`ZeRoTraceMode.INVALID`), so that nothing is fetched ahead or kept for reuse. Where the settings would
    keep more than two of the largest, they are counted all the same, should the trace be complete one day.
    """
    if run.stage < 3:
        return 0
    from_disk = run.offload_parameters == "nvme"
    if run.on_cpu and run.world_size == 1 and not from_disk:
        return 0
    live = 0 if from_disk or run.live_parameters <= 2 * run.largest else run.live_parameters
    return min(run.whole, max(run.largest, live)) * run.itemsize


def _passes(run: DeepSpeedRun, buckets: int, reduced: int) -> MemoryBreakdown:
    """Backward's start, when activations are there, or reducing the largest gradient at its end.

    Both need that gradient; where the parameter is tied, which a partitioned module doesn't tell, two of them and their
    sum. Gradients that go to the host have their norm taken first, in fp64 (`set_norm_for_param_grad_in_gpu`).
    """
    gradient, offloaded = run.largest * run.itemsize, run.offload_optimizer != "none"
    if run.stage < 3:
        norm = min(run.largest, run.share) * _FP64 * offloaded
        earlier = reduced if run.accumulates else 0
        widest = buckets + max(earlier + gradient + run.activation_bytes, reduced + gradient, reduced + norm)
        return MemoryBreakdown.device({Category.TEMPORARY: widest})
    norm = min(run.largest // run.world_size, _NORM_CHUNK) * _FP64 * offloaded
    copied = gradient if run.world_size > 1 or run.offload_parameters == "nvme" else 0  # `reduce_scatter_coalesced`
    start = _gathered(run) + gradient + run.activation_bytes
    widest = max(start, 3 * gradient, copied + norm)
    held = _held(run, [numel for numel in run.shares if numel < max(run.shares)])
    return MemoryBreakdown.device({Category.TEMPORARY: widest}) + held


def _held(run: DeepSpeedRun, shares: Sequence[int]) -> MemoryBreakdown:
    """fp32 gradients that stay in host memory from the backward pass until their sub-group is stepped.

    Those that don't fill an aligned piece of a file: what is left over is a view (`_adjust_for_misaligned_lengths`),
    which keeps the whole.
    """
    if run.sizes is None or run.offload_optimizer != "nvme":
        return MemoryBreakdown()
    step, least = run.sizes.aio.aligned(1, _FP32), run.sizes.aio.min_swapped_bytes
    held = sum(n * _FP32 for n in shares if n % step and n * _FP32 >= least)
    return MemoryBreakdown.on(Tier.HOST, {Category.GRADIENT: held})


def _update(run: DeepSpeedRun) -> MemoryBreakdown:
    """Of the first step or any other, whichever takes more.

    From disk, the optimizer makes the states of its first step in new memory, a sub-group at a time. On the device,
    gradients are flattened and widened to fp32, and are gone when the optimizer takes its scratch memory; their norm is
    taken in fp64. Only gloo needs room to gather the new weights of stages 1 and 2: `all_gather_into_tensor` of NCCL
    writes where they belong.
    """
    if run.offload_optimizer == "nvme":
        states = {Category.OPTIMIZER_STATE: round(run.state_bytes * run.stepped)}
        return MemoryBreakdown.on(Tier.HOST, states) + _held(run, run.shares)
    gathered = run.whole * run.itemsize if run.world_size > 1 and run.stage < 3 and run.on_cpu else 0
    if run.offload_optimizer == "cpu":
        return MemoryBreakdown.device({Category.COMMUNICATION: gathered})
    widened = run.itemsize + (_FP32 if run.itemsize != _FP32 else 0)
    stepping = run.stepped * (_FP32 + run.scratch_bytes)
    if run.stage == 3:
        norm = -(-run.largest // run.world_size) * _FP64
        size = max(norm, run.stepped * widened, stepping)
    else:
        flat = run.share * run.itemsize
        norm = min(run.largest, run.share) * _FP64
        size = max(flat + run.share * widened, flat + norm, gathered, stepping)
    return MemoryBreakdown.device({Category.TEMPORARY: size})
