"""Model states under ZeRO-Infinity with disk: what one rank keeps on device, pinned host, host and disk, to the byte.

`states.model_states` gives the bytes per parameter of the papers. With files on disk it also matters which tensors are
large enough to be swapped, how they are aligned, and the buffers between the tiers, which are set by the largest
parameter. Counted after DeepSpeed 0.19.8 (`runtime/zero/stage3.py`, `runtime/swap_tensor`).
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memfit.estimate.optimizers import optimizer_family
from lightning_memfit.memory import Category, MemoryBreakdown, Tier
from lightning_memfit.nvme.sizing import InfinitySizes
from lightning_memfit.profile.record import ParameterInfo

PERSISTENT_NUMEL = 100_000
"""Parameters up to this size stay on the device (`stage3_param_persistence_threshold`, DeepSpeed's default)."""

_FP32 = 4


def zero_infinity_states(
    parameters: Sequence[ParameterInfo],
    sizes: InfinitySizes,
    world_size: int = 1,
    optimizer: str = "adamw",
    offload_optimizer: bool = True,
    offload_parameters: bool = True,
    bucket_size: int = 0,
) -> MemoryBreakdown:
    """Bytes of model states and of the buffers between tiers, per rank; activations come on top.

    Disk holds fp32 master weights, gradients and states of every sub-group, and the weights: 18 bytes per parameter
    with AdamW in bf16, 20 in fp32. A checkpoint copies master weights and states, 12 bytes more. Gradients also have a
    buffer in the weights' dtype, for the whole model, in host memory.

    Args:
        parameters: Parameter table of a profile.
        sizes: Of `infinity_sizes`, for the same parameters and world size.
        world_size: Ranks that share every parameter.
        optimizer: Family name; its states are kept in fp32.
        offload_optimizer: Whether the states go to disk; otherwise they and the gradients are on the device.
        offload_parameters: Whether the weights do; otherwise each rank's share is on its device.
        bucket_size: Elements of the reduce bucket, on the device.
    """
    distinct = [parameter for parameter in parameters if not parameter.shared_with]
    trained = [-(-parameter.numel // world_size) for parameter in distinct if parameter.trainable]
    weights = _weights(parameters, sizes, world_size, offload_parameters)
    states = _states(sizes, optimizer_family(optimizer).num_states, offload_optimizer)
    gradients = _gradients(trained, sizes, offload_optimizer)
    return weights + states + gradients + _buffers(distinct, sizes, offload_optimizer, offload_parameters, bucket_size)


def checkpoint_bytes(sizes: InfinitySizes, optimizer: str = "adamw") -> int:
    """Bytes that saving a checkpoint adds per rank: copies of master weights and states."""
    states = _states(sizes, optimizer_family(optimizer).num_states, True)
    return sum(size for _, _, size in states)


def _weights(
    parameters: Sequence[ParameterInfo], sizes: InfinitySizes, world_size: int, offloaded: bool
) -> MemoryBreakdown:
    """Weights by tier. A tied one was written before it was tied, and its file stays."""
    by_tier = dict.fromkeys(Tier, 0)
    kept = sizes.max_in_cpu if offloaded else 0
    for parameter in parameters:
        partition, tied = -(-parameter.numel // world_size), bool(parameter.shared_with)
        if not offloaded or parameter.numel <= PERSISTENT_NUMEL:
            by_tier[Tier.DEVICE] += partition * sizes.itemsize * (not tied)
        elif partition * sizes.itemsize >= sizes.aio.min_swapped_bytes:
            by_tier[Tier.DISK] += sizes.aio.aligned(partition, sizes.itemsize) * sizes.itemsize
        elif not tied:
            by_tier[Tier.HOST] += partition * sizes.itemsize
    by_tier[Tier.HOST] += kept * sizes.itemsize
    return MemoryBreakdown({(tier, Category.PARAMETER): size for tier, size in by_tier.items()})


def _states(sizes: InfinitySizes, num_states: int, offloaded: bool) -> MemoryBreakdown:
    by_tier = dict.fromkeys((Tier.DISK, Tier.HOST, Tier.DEVICE), 0)
    for numel in sizes.sub_groups:
        swapped = offloaded and numel * _FP32 >= sizes.aio.min_swapped_bytes
        stored = sizes.aio.aligned(numel, _FP32) if swapped else numel
        tier = Tier.DISK if swapped else Tier.HOST if offloaded else Tier.DEVICE
        by_tier[tier] += (1 + num_states) * stored * _FP32
    return MemoryBreakdown({(tier, Category.OPTIMIZER_STATE): size for tier, size in by_tier.items()})


def _gradients(trained: Sequence[int], sizes: InfinitySizes, offloaded: bool) -> MemoryBreakdown:
    """A buffer of the weights' dtype for all of them, and fp32 ones for the step: on disk where large enough.

    What doesn't fill an aligned piece of a file is kept in memory. Where the step is on the device, so is the buffer.
    """
    host, disk = sum(trained) * sizes.itemsize, 0
    if not offloaded:
        return MemoryBreakdown.device({Category.GRADIENT: host})
    step = sizes.aio.aligned(1, _FP32)
    for numel in trained:
        swapped = numel * _FP32 >= sizes.aio.min_swapped_bytes
        on_disk = numel // step * step if swapped else 0
        disk += on_disk * _FP32
        host += (numel - on_disk) * _FP32
    return MemoryBreakdown({(Tier.HOST, Category.GRADIENT): host, (Tier.DISK, Category.GRADIENT): disk})


def held_gradients(numels: Sequence[int], sizes: InfinitySizes) -> int:
    """Bytes of fp32 gradients that stay in host memory from the backward pass until their sub-group is stepped.

    Those that don't fill an aligned piece of a file: what is left over is a view (`_adjust_for_misaligned_lengths`),
    which keeps the whole.

    Args:
        numels: Elements of this rank's shares.
        sizes: In use.
    """
    step = sizes.aio.aligned(1, _FP32)
    return sum(n * _FP32 for n in numels if n % step and n * _FP32 >= sizes.aio.min_swapped_bytes)


def _buffers(
    parameters: Sequence[ParameterInfo], sizes: InfinitySizes, optimizer: bool, weights: bool, bucket_size: int
) -> MemoryBreakdown:
    """Staging buffers in pinned memory; on the device one gathered parameter, its gradient and the reduce bucket.

    DeepSpeed is told to keep no parameter longer than its module runs, so that one at a time is whole.
    """
    largest = max((parameter.numel for parameter in parameters), default=0)
    pinned = optimizer * sizes.optimizer_buffer_bytes + weights * sizes.param_buffer_bytes
    return MemoryBreakdown(
        {
            (Tier.PINNED_HOST, Category.COMMUNICATION): pinned,
            (Tier.DEVICE, Category.COMMUNICATION): (2 * largest + bucket_size) * sizes.itemsize,
        }
    )
