"""What-if arithmetic for models divided by their computation: tensor, pipeline and expert parallelism.

Tensor parallelism is what `FullyShardedStrategy(tensor_parallel_size=...)` does. Pipelines and experts are accounted
for only, to tell what other frameworks would need; no strategy here runs them. Apply `with_sharding` with the
data-parallel ranks afterwards.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

from lightning_memfit.estimate.sharding import IN_BLOCK
from lightning_memfit.estimate.variants import Variant
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.profile.record import ParameterInfo

_EXPERT = re.compile(r"(^|\.)experts?\.")


def with_tensor_parallelism(variant: Variant, size: int) -> Variant:
    """Blocks computed by several ranks together, as `FullyShardedStrategy(tensor_parallel_size=...)` divides them.

    Divided are matrices with a dimension that `size` divides, with their gradients, optimizer states and the step's
    scratch memory; norms and biases are whole on every rank. The largest matrix outside of the blocks (an embedding or
    a head) is gathered to be used, with its gradient, as communication. Activations stay as they are, an upper bound:
    of a transformer layer's, ranks keep what `layer_activation_bytes(..., tensor_parallel_size)` says.

    Args:
        variant: Of one device that holds everything.
        size: Ranks that compute together.

    Raises:
        ValueError: If `size` is less than 1.
    """
    if _is_alone("size", size):
        return variant
    outside = (p.numel * p.itemsize for p in variant.parameters if p.dims > 1 and not IN_BLOCK.match(p.name))
    gathered = MemoryBreakdown.device({Category.COMMUNICATION: 2 * max(outside, default=0)})
    changed = _keeping(variant, tuple(_part(parameter, size) for parameter in variant.parameters))
    return replace(changed, phases={name: breakdown + gathered for name, breakdown in changed.phases.items()})


def with_pipeline_parallelism(variant: Variant, num_stages: int, num_micro_batches: int) -> Variant:
    """Blocks divided among stages that pass activations on: what the first stage keeps under the 1F1B schedule.

    It has its share of the blocks and everything outside of them, an upper bound (an untied head is the last stage's).
    Forward runs ahead of backward by up to one micro-batch per stage, so that activations of
    `min(num_stages, num_micro_batches)` micro-batches are alive, each of one stage's blocks: with enough micro-batches
    as much as one device keeps for all blocks (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, 4.2.3).

    Args:
        variant: Of one device that holds everything.
        num_stages: Ranks that divide the blocks, at most as many as there are.
        num_micro_batches: Per optimizer step.

    Raises:
        ValueError: If a number is less than 1, or there are fewer blocks than stages.
    """
    alone = _is_alone("num_stages", num_stages)
    if num_micro_batches < 1:
        raise ValueError(f"`num_micro_batches={num_micro_batches}` must be at least 1.")
    if alone:
        return variant
    blocks = _blocks(variant.parameters)
    if len(blocks) < num_stages:
        raise ValueError(f"`num_stages={num_stages}`: there are {len(blocks)} blocks. Use at most as many stages.")
    first = set(blocks[: ceil(len(blocks) / num_stages)])
    kept = tuple(p for p in variant.parameters if (match := IN_BLOCK.match(p.name)) is None or match[1] in first)
    changed = _keeping(variant, kept)
    alive = len(first) / len(blocks) * min(num_stages, num_micro_batches)
    factors = {Category.ACTIVATION: alive}
    return replace(changed, phases={name: _scaled(found, factors) for name, found in changed.phases.items()})


def with_expert_parallelism(variant: Variant, size: int) -> Variant:
    """Experts of a mixture divided among ranks; everything else is whole on each. Tokens are taken to be balanced.

    Then as many come in as go out, so that activations stay what they are. Parameters are experts' if their names hold
    `experts.`, as in Hugging Face models.

    Args:
        variant: Of one device that holds everything.
        size: Ranks that divide the experts.

    Raises:
        ValueError: If `size` is less than 1, or no parameter belongs to an expert.
    """
    if _is_alone("size", size):
        return variant
    if not any(_EXPERT.search(p.name) for p in variant.parameters):
        raise ValueError("No parameter's name holds `experts.`: this model has no experts to divide.")
    parts = (replace(p, numel=ceil(p.numel / size)) if _EXPERT.search(p.name) else p for p in variant.parameters)
    return _keeping(variant, tuple(parts))


def _keeping(variant: Variant, parameters: tuple[ParameterInfo, ...]) -> Variant:
    """The variant with fewer or smaller parameters: their gradients, states and the step's scratch follow."""
    changed = replace(variant, parameters=parameters)
    weights = _num_bytes(parameters) / _num_bytes(variant.parameters)
    trained = changed.trained_bytes() / (variant.trained_bytes() or 1)
    factors = {Category.PARAMETER: weights, Category.GRADIENT: trained, Category.OPTIMIZER_STATE: trained}
    phases = {name: _scaled(breakdown, factors) for name, breakdown in variant.phases.items()}
    if "step" in phases:
        phases["step"] = _scaled(variant.phases["step"], factors | {Category.TEMPORARY: trained})
    return replace(changed, phases=phases)


def _scaled(breakdown: MemoryBreakdown, factors: dict[Category, float]) -> MemoryBreakdown:
    return MemoryBreakdown({(tier, category): ceil(n * factors.get(category, 1)) for tier, category, n in breakdown})


def _blocks(parameters: tuple[ParameterInfo, ...]) -> list[str]:
    """Names of repeated blocks, in the order of the model."""
    return list(dict.fromkeys(match[1] for p in parameters if (match := IN_BLOCK.match(p.name)) is not None))


def _part(parameter: ParameterInfo, size: int) -> ParameterInfo:
    is_divided = parameter.dims > 1 and any(length % size == 0 for length in parameter.shape)
    return replace(parameter, numel=parameter.numel // size) if is_divided else parameter


def _num_bytes(parameters: tuple[ParameterInfo, ...]) -> int:
    return sum(p.numel * p.itemsize for p in parameters if not p.shared_with)


def _is_alone(name: str, size: int) -> bool:
    if size < 1:
        raise ValueError(f"`{name}={size}` must be at least 1.")
    return size == 1
