"""What-if arithmetic across devices and tiers: ZeRO and FSDP stages, states on host or disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from lightning_memfit.estimate.states import check_placement
from lightning_memfit.estimate.variants import Variant
from lightning_memfit.memory import Category, MemoryBreakdown, Tier
from lightning_memfit.profile.record import ParameterInfo

IN_BLOCK = re.compile(r"(.+?\.\d+)\.")
"""Names of parameters of repeated blocks; the group is the block."""

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
            match = IN_BLOCK.match(parameter.name)
            key = match[1] if match else parameter.name
            groups[key] = groups.get(key, 0) + parameter.numel * parameter.itemsize
    return max(groups.values(), default=0)


def _each(variant: Variant, change: Callable[[MemoryBreakdown], MemoryBreakdown]) -> Variant:
    return replace(variant, phases={name: change(breakdown) for name, breakdown in variant.phases.items()})
