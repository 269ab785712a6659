"""Memory of a rank under ZeRO, moment by moment: what DeepSpeed keeps, and what it holds for a short while besides.

A machine must have the largest moment free (`nvme.peaks`). On the CPU device and host memory are one and add up.
Counted after DeepSpeed 0.19.8, in `runtime/zero/stage_1_and_2.py` (`DeepSpeedZeroOptimizer`), `stage3.py`
(`DeepSpeedZeroOptimizer_Stage3`) and `runtime/swap_tensor`, with an optimizer that needs no scratch memory, as fused
ones and DeepSpeed's own; `benchmarks/offload_host_memory` holds it against measured runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_memfit.estimate.optimizers import optimizer_family
from lightning_memfit.estimate.zero_infinity import held_gradients, zero_infinity_states
from lightning_memfit.memory import MIB, Category, MemoryBreakdown, Tier
from lightning_memfit.nvme.sizing import InfinitySizes
from lightning_memfit.profile.record import ParameterInfo

LIBRARIES_BYTES = 80 * MIB
"""What a process takes between the preflight and its second step for code, threads and Python objects: kernels that are
loaded or compiled when first used, hooks, the engine. Measured, see `benchmarks/offload_host_memory`."""

ASYNC_IO_BYTES = 10 * MIB
"""The same for asynchronous I/O: its kernels, queues and threads."""

_FP32, _FP64 = 4, 8
_NORM_CHUNK = 250_000_000  # elements, `_constant_buffered_norm2`

Place = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class ZeroRun:
    """What of a run decides the memory of its ranks. Sizes are in elements.

    Raises:
        ValueError: If nothing is trained, or disk is used without `sizes`.
    """

    parameters: Sequence[ParameterInfo]
    """Whole ones, of `parameter_table` or `ModelShape`."""
    stage: int = 3
    world_size: int = 1
    itemsize: int = 2
    """Bytes per element of the weights and gradients."""
    optimizer: str = "adamw"
    """Family name; its states are kept in fp32."""
    offload_optimizer: Place = "none"
    offload_parameters: Place = "none"
    bucket_size: int = 0
    """`reduce_bucket_size`."""
    sub_group_size: int = 0
    """With stage 3 and nothing on disk; 0 is one sub-group."""
    live_parameters: int = 0
    """`stage3_max_live_parameters`: gathered at one time at most, beside those of the module that runs."""
    sizes: InfinitySizes | None = None
    """With anything on disk."""
    pin_memory: bool = False
    on_cpu: bool = False
    """Whether the CPU is the device: a weight that is whole already is then used where it lies."""
    activation_bytes: int = 0
    """Peak of a micro-batch's activations and temporary tensors, on the device."""

    def __post_init__(self) -> None:
        if not self.trained:
            raise ValueError("`parameters` holds none that is trained.")
        if "nvme" in (self.offload_optimizer, self.offload_parameters) and self.sizes is None:
            raise ValueError("`sizes` is needed with anything on disk: pass those of `infinity_sizes`.")

    @property
    def num_states(self) -> int:
        """State tensors of the optimizer's."""
        return optimizer_family(self.optimizer).num_states

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


def zero_moments(run: ZeroRun) -> dict[str, MemoryBreakdown]:
    """Bytes by tier at each moment of a run, from where the model is built on.

    Returns:
        `kept` is what stays between steps; `build` of the model, `setup` of the engine, `passes` (forward and backward)
        and `update` are peaks.
    """
    kept = _kept(run) + _residue(run)
    moments: dict[str, MemoryBreakdown] = {
        "build": _build(run),
        "setup": _setup(run),
        "kept": kept,
        "passes": kept + _passes(run),
        "update": kept + _update(run),
    }
    code = LIBRARIES_BYTES + ASYNC_IO_BYTES * (run.sizes is not None)
    libraries = MemoryBreakdown.on(Tier.HOST, {Category.RUNTIME_CONTEXT: code})
    return {name: moment + libraries for name, moment in moments.items()}


# --- what stays -----------------------------------------------------------------------------------------------------


def _kept(run: ZeroRun) -> MemoryBreakdown:
    bucket = MemoryBreakdown.device({Category.COMMUNICATION: run.bucket_size * run.itemsize * (run.stage == 3)})
    if run.sizes is None:
        return bucket + (_in_memory(run) if run.stage == 3 else _below_stage_3(run))
    places = (run.offload_optimizer == "nvme", run.offload_parameters == "nvme")
    states = zero_infinity_states(run.parameters, run.sizes, run.world_size, run.optimizer, *places)
    return states.replace(Category.COMMUNICATION, 0) + bucket


def _residue(run: ZeroRun) -> MemoryBreakdown:
    """Of activations on the CPU: blocks too small to be mapped one by one (`memory.process`) leave holes in a heap."""
    left = run.activation_bytes // 3 if run.on_cpu else 0
    return MemoryBreakdown.on(Tier.HOST, {Category.FRAGMENTATION: left})


def _in_memory(run: ZeroRun) -> MemoryBreakdown:
    """Stage 3: flat weights (`_create_fp16_partitions_with_defragmentation`) and gradients, masters and states.

    Weights on the host are pinned whatever `pin_memory` says (`_create_param_groups_fp16_flat_cpu_memory`).
    """
    share, offloaded = run.share, run.offload_optimizer == "cpu"
    states = Tier.HOST if offloaded else Tier.DEVICE
    gradients = _pinned(run) if offloaded else Tier.DEVICE
    weights = Tier.DEVICE if run.offload_parameters == "none" else Tier.HOST if run.on_cpu else Tier.PINNED_HOST
    masters = run.itemsize != _FP32 or offloaded  # else the weights themselves
    return (
        MemoryBreakdown.on(weights, {Category.PARAMETER: -(-run.whole // run.world_size) * run.itemsize})
        + MemoryBreakdown.on(states, {Category.OPTIMIZER_STATE: (masters + run.num_states) * share * _FP32})
        + MemoryBreakdown.on(gradients, {Category.GRADIENT: share * (run.itemsize + offloaded * _FP32)})
    )


def _below_stage_3(run: ZeroRun) -> MemoryBreakdown:
    """Stages 1 and 2: whole weights, masters and states; with offloading also buffers of both sides, and gradients.

    These are `param_buffer_of_bit16_for_cpu_offload_groups` and two `temp_grad_buffer_for_*_offload`.
    """
    weights = MemoryBreakdown.device({Category.PARAMETER: run.whole * run.itemsize})
    states = {Category.OPTIMIZER_STATE: (1 + run.num_states) * run.share * _FP32}
    if run.offload_optimizer == "none":
        return weights + MemoryBreakdown.device(states)
    moved = run.largest * run.itemsize
    buffers = {Category.GRADIENT: run.share * _FP32, Category.COMMUNICATION: run.share * run.itemsize + moved}
    on_host = MemoryBreakdown.on(Tier.HOST, states) + MemoryBreakdown.on(_pinned(run), buffers)
    return weights + on_host + MemoryBreakdown.device({Category.COMMUNICATION: moved})


def _pinned(run: ZeroRun) -> Tier:
    return Tier.PINNED_HOST if run.pin_memory and not run.on_cpu else Tier.HOST


# --- what comes and goes --------------------------------------------------------------------------------------------


def _build(run: ZeroRun) -> MemoryBreakdown:
    """Below stage 3 the whole model is built on the host in fp32, the largest parameter with a copy as it is made."""
    elements = run.largest + (run.whole if run.stage < 3 else 0)
    return MemoryBreakdown.on(Tier.HOST, {Category.PARAMETER: elements * _FP32})


def _setup(run: ZeroRun) -> MemoryBreakdown:
    """Below stage 3, flat weights are made beside the weights, and masters by way of a copy in the weights' dtype."""
    if run.stage == 3:
        return MemoryBreakdown()
    device = 2 * run.whole * run.itemsize + run.share * (run.itemsize + _FP32)
    return MemoryBreakdown.device({Category.PARAMETER: device})


def _passes(run: ZeroRun) -> MemoryBreakdown:
    """Backward's start, when activations are there, or reducing the largest gradient at its end.

    Both need that gradient; where the parameter is tied, which a partitioned module doesn't tell, two of them and their
    sum. Gradients that go to the host have their norm taken first, in fp64 (`_constant_buffered_norm2`).
    """
    gradient = run.largest * run.itemsize
    norm = min(run.largest, _NORM_CHUNK) * _FP64 if run.offload_optimizer != "none" else 0
    if run.stage < 3:
        reduced = (run.whole if run.stage == 1 else run.share) * run.itemsize * (run.offload_optimizer == "none")
        buckets = min(2 * run.bucket_size, run.whole) * run.itemsize  # two, for `overlap_comm`
        widest = buckets + max(gradient + run.activation_bytes, reduced + gradient, reduced + norm)
        return MemoryBreakdown.device({Category.TEMPORARY: widest})
    copied = gradient if run.world_size > 1 or run.offload_parameters == "nvme" else 0  # `reduce_scatter_coalesced`
    start = _gathered(run) + gradient + run.activation_bytes
    widest = max(start, 3 * gradient, copied + norm // run.world_size)
    held = _held(run, [numel for numel in run.shares if numel < max(run.shares)])
    return MemoryBreakdown.device({Category.TEMPORARY: widest}) + held


def _held(run: ZeroRun, shares: Sequence[int]) -> MemoryBreakdown:
    if run.sizes is None or run.offload_optimizer != "nvme":
        return MemoryBreakdown()
    return MemoryBreakdown.on(Tier.HOST, {Category.GRADIENT: held_gradients(shares, run.sizes)})


def _gathered(run: ZeroRun) -> int:
    """Whole weights beside the shares, while the largest parameter is in use.

    One rank on the CPU uses its share as it is, unless that lies in a swap buffer. More are kept from forward to
    backward only where `stage3_max_reuse_distance`, here the same as live parameters, spans the largest one twice.
    """
    from_disk = run.offload_parameters == "nvme"
    if run.on_cpu and run.world_size == 1 and not from_disk:
        return 0
    live = 0 if from_disk or run.live_parameters <= 2 * run.largest else run.live_parameters
    return min(run.whole, max(run.largest, live)) * run.itemsize


def _update(run: ZeroRun) -> MemoryBreakdown:
    """Of the first step or any other, whichever takes more.

    From disk, the optimizer makes the states of its first step in new memory, a sub-group at a time. On the device,
    gradients are flattened and widened to fp32; their norm is taken in fp64.
    """
    if run.offload_optimizer == "nvme":
        states = {Category.OPTIMIZER_STATE: run.num_states * run.stepped * _FP32}
        return MemoryBreakdown.on(Tier.HOST, states) + _held(run, run.shares)
    widened = run.itemsize + (_FP32 if run.itemsize != _FP32 else 0)
    norm = min(run.largest, run.share) * _FP64
    gathered = run.whole * run.itemsize if run.world_size > 1 and run.stage < 3 else 0
    if run.offload_optimizer == "cpu":
        return MemoryBreakdown.device({Category.COMMUNICATION: gathered})
    if run.stage == 3:
        size = max(-(-run.largest // run.world_size) * _FP64, run.stepped * widened)
    else:
        size = max(run.share * (run.itemsize + widened), run.share * run.itemsize + norm, gathered)
    return MemoryBreakdown.device({Category.TEMPORARY: size})
