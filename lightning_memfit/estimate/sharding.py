"""What-if arithmetic across devices and tiers: ZeRO and FSDP stages, tensor parallelism, states on host or disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Literal

from lightning_memfit.estimate.states import check_placement
from lightning_memfit.estimate.variants import Variant
from lightning_memfit.memory import Category, MemoryBreakdown, Tier
from lightning_memfit.profile.record import ParameterInfo

_IN_BLOCK = re.compile(r"(.+?\.\d+)\.")

Stage = Literal[0, 1, 2, 3]


def with_sharding(
    variant: Variant, stage: Stage, world_size: int, bucket_bytes: int = 0, prefetched_blocks: int = 1
) -> Variant:
    """States divided among ranks: ZeRO 1 (optimizer states), 2 (and gradients) or 3 (and parameters, as FSDP2).

    Shares are equal; in stage 3 the whole weights of the running block and of the prefetched ones, and that block's
    whole gradients, are on every rank besides (as communication). Buffers that libraries keep are an argument, as their
    sizes are settings. Activations stay, and so do temporary weights in half precision under autocast.

    Args:
        variant: Of one device that holds everything.
        stage: 0 replicates.
        world_size: Ranks.
        bucket_bytes: Bytes of a reduce or gather bucket, kept on every rank while there is more than one.
        prefetched_blocks: Blocks gathered ahead in stage 3.

    Raises:
        ValueError: If the stage or the world size is out of range.
    """
    check_placement(stage, world_size)
    if world_size == 1:
        return variant
    divided = {Category.OPTIMIZER_STATE: 1, Category.GRADIENT: 2, Category.PARAMETER: 3}
    block = largest_block_bytes(variant.parameters)
    gathered = block * (2 + prefetched_blocks) if stage == 3 else 0

    def share(breakdown: MemoryBreakdown) -> MemoryBreakdown:
        shared = {
            (tier, category): -(-size // world_size) if stage >= divided.get(category, 4) else size
            for tier, category, size in breakdown
        }
        extra = MemoryBreakdown.device({Category.COMMUNICATION: bucket_bytes + gathered})
        return MemoryBreakdown(shared) + extra

    return _each(variant, share)


def with_tensor_parallelism(variant: Variant, size: int) -> Variant:
    """Blocks computed by several ranks together, as `FullyShardedStrategy(tensor_parallel_size=...)` divides them.

    Divided are matrices with a dimension that `size` divides, with their gradients, optimizer states and the step's
    scratch memory; norms and biases are whole on every rank. The largest matrix outside of the blocks (an embedding or
    a head) is gathered to be used, with its gradient, as communication. Activations stay as they are, an upper bound:
    of a transformer layer's, ranks keep what `layer_activation_bytes(..., tensor_parallel_size)` says. Apply
    `with_sharding` with the data-parallel ranks afterwards.

    Args:
        variant: Of one device that holds everything.
        size: Ranks that compute together.

    Raises:
        ValueError: If `size` is less than 1.
    """
    if size < 1:
        raise ValueError(f"`size={size}` must be at least 1.")
    if size == 1:
        return variant
    parts = tuple(_part(parameter, size) for parameter in variant.parameters)
    changed = replace(variant, parameters=parts)
    weights = _num_bytes(parts) / _num_bytes(variant.parameters)
    trained = changed.trained_bytes() / (variant.trained_bytes() or 1)
    factors = {Category.PARAMETER: weights, Category.GRADIENT: trained, Category.OPTIMIZER_STATE: trained}
    outside = (p.numel * p.itemsize for p in variant.parameters if p.dims > 1 and not _IN_BLOCK.match(p.name))
    gathered = MemoryBreakdown.device({Category.COMMUNICATION: 2 * max(outside, default=0)})

    def divide(breakdown: MemoryBreakdown, of_phase: dict[Category, float]) -> MemoryBreakdown:
        return MemoryBreakdown({(t, category): ceil(n * of_phase.get(category, 1)) for t, category, n in breakdown})

    phases = {name: divide(breakdown, factors) + gathered for name, breakdown in variant.phases.items()}
    if "step" in phases:
        phases["step"] = divide(variant.phases["step"], factors | {Category.TEMPORARY: trained})
    return replace(changed, phases=phases)


def with_offload(
    variant: Variant,
    optimizer: Literal["none", "cpu", "nvme"] = "none",
    parameters: Literal["none", "cpu", "nvme"] = "none",
) -> Variant:
    """Optimizer states (gradients follow them to the host) or stage 3's shards of the weights on another tier.

    The step then runs on the host, so that its scratch memory leaves the device too. Staging buffers in pinned memory
    are settings of the strategy and not counted.

    Args:
        variant: Sharded where parameters are offloaded, so that gathered weights are in it.
        optimizer: Where the states lie.
        parameters: Where the weights lie.

    Raises:
        ValueError: If parameters are offloaded without their gathered working set.
    """
    tiers = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}
    for name, target in (("optimizer", optimizer), ("parameters", parameters)):
        if target not in tiers:
            raise ValueError(f"`{name}={target!r}` must be none, cpu or nvme.")
    if parameters != "none" and not any(b.get(Category.COMMUNICATION) for b in variant.phases.values()):
        raise ValueError(f"`parameters={parameters!r}` needs stage 3: apply `with_sharding(variant, 3, ...)` first.")
    targets = {
        Category.OPTIMIZER_STATE: tiers[optimizer],
        Category.GRADIENT: Tier.HOST if optimizer != "none" else Tier.DEVICE,
        Category.PARAMETER: tiers[parameters],
    }

    def move(breakdown: MemoryBreakdown) -> MemoryBreakdown:
        moved = MemoryBreakdown()
        for tier, category, size in breakdown:
            moved += MemoryBreakdown.on(targets.get(category, tier) if tier is Tier.DEVICE else tier, {category: size})
        return moved

    changed = _each(variant, move)
    if optimizer == "none" or "step" not in changed.phases:
        return changed
    step = changed.phases["step"].replace(Category.TEMPORARY, 0)
    return replace(changed, phases={**changed.phases, "step": step})


def largest_block_bytes(parameters: tuple[ParameterInfo, ...]) -> int:
    """Bytes of the largest group of parameters that a sharded step gathers at once.

    A group is a repeated block (`h.3.` in its names) or a tensor outside of all, such as an embedding.
    """
    groups: dict[str, int] = {}
    for parameter in parameters:
        if not parameter.shared_with:
            match = _IN_BLOCK.match(parameter.name)
            key = match[1] if match else parameter.name
            groups[key] = groups.get(key, 0) + parameter.numel * parameter.itemsize
    return max(groups.values(), default=0)


def _part(parameter: ParameterInfo, size: int) -> ParameterInfo:
    is_divided = parameter.dims > 1 and any(length % size == 0 for length in parameter.shape)
    return replace(parameter, numel=parameter.numel // size) if is_divided else parameter


def _num_bytes(parameters: tuple[ParameterInfo, ...]) -> int:
    return sum(p.numel * p.itemsize for p in parameters if not p.shared_with)


def _each(variant: Variant, change: Callable[[MemoryBreakdown], MemoryBreakdown]) -> Variant:
    return replace(variant, phases={name: change(breakdown) for name, breakdown in variant.phases.items()})
