"""What-if arithmetic for LoRA adapters and quantized frozen weights (Hu et al. 2021; Dettmers et al. 2022, 2023)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lightning_memfit.estimate.optimizers import OptimizerFamily, optimizer_family
from lightning_memfit.estimate.variants import Variant
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.profile.record import ParameterInfo

_BLOCK_4BIT = 64
"""Weights that share one scale in bitsandbytes' 4-bit linear layers."""

_DOUBLE_BLOCK = 256
"""Scales that share one fp32 scale of their own with double quantization."""

_NOT_LINEAR = ("emb", "wte", "wpe", "shared", "lm_head", "norm", "ln_")
"""Parts of names of matrices that neither LoRA nor quantization touches by default: embeddings, heads tied to them."""


def linear_weights(parameters: Collection[ParameterInfo], names: Collection[str] = ()) -> list[ParameterInfo]:
    """Matrices of linear layers: those whose name holds one of `names`, by default all but embeddings and heads."""
    matrices = [p for p in parameters if p.dims == 2 and not p.shared_with]
    if names:
        return [p for p in matrices if any(name in p.name for name in names)]
    return [p for p in matrices if not any(part in p.name for part in _NOT_LINEAR)]


def with_lora(
    variant: Variant,
    rank: int,
    optimizer: str | OptimizerFamily = "adamw",
    targets: Collection[str] = (),
    adapter_itemsize: int = 4,
) -> Variant:
    """Frozen weights with an adapter of two thin matrices beside each target.

    Activations stay as traced, which is an upper bound: a frozen weight's input need not be kept, but the adapter's
    input is the same tensor; what is saved are inputs of layers without adapter, norms included.

    Args:
        variant: Of full training.
        rank: Inner width of the adapters.
        optimizer: Family that steps the adapters.
        targets: Parts of the names of the weights that get one; by default every linear layer.
        adapter_itemsize: Bytes per element of the adapters.

    Raises:
        ValueError: If the rank is below 1, no weight is a target, or shapes aren't known.
    """
    if rank < 1:
        raise ValueError(f"`rank={rank}` must be at least 1.")
    chosen = linear_weights(variant.parameters, targets)
    if not chosen or any(len(p.shape) != 2 for p in chosen):
        raise ValueError(f"`targets={list(targets)}` match no linear weight whose shape is known.")
    family = optimizer if isinstance(optimizer, OptimizerFamily) else optimizer_family(optimizer)
    adapters = tuple(
        ParameterInfo(f"{p.name}.lora_{part}", rank * side, adapter_itemsize, True, 2, "", (rank, side))
        for p in chosen
        for part, side in zip("AB", p.shape, strict=True)
    )
    unit = variant.rounding_bytes
    added = sum(-(-p.numel * p.itemsize // unit) * unit for p in adapters)
    states = family.total_bytes(adapters, unit)
    frozen = tuple(replace(p, trainable=False) for p in variant.parameters)

    def change(name: str, breakdown: MemoryBreakdown) -> MemoryBreakdown:
        whole = breakdown.get(Category.PARAMETER)
        gradients = 0 if breakdown.get(Category.GRADIENT) == 0 else added
        changed = breakdown.replace(Category.PARAMETER, whole + added).replace(Category.GRADIENT, gradients)
        if name == "step":
            changed = changed.replace(Category.TEMPORARY, added * (family.scratch_copies or 0))
        return changed.replace(Category.OPTIMIZER_STATE, states)

    phases = {name: change(name, breakdown) for name, breakdown in variant.phases.items()}
    return replace(variant, phases=phases, parameters=(*frozen, *adapters))


def with_quantized_weights(
    variant: Variant, bits: int, double_quantization: bool = True, names: Collection[str] = ()
) -> Variant:
    """Frozen linear weights in 4 or 8 bits with their scales; one whole weight exists while it is in use.

    Args:
        variant: Whose linear weights are frozen, for example after `with_lora`.
        bits: 4 (bitsandbytes' `Linear4bit`, blocks of 64) or 8 (`Linear8bitLt`, one fp32 scale per row).
        double_quantization: With 4 bits: scales in 8 bits.
        names: Parts of the names of the weights; by default every linear layer.

    Raises:
        ValueError: If `bits` is neither, or a weight is trained.
    """
    if bits not in (4, 8):
        raise ValueError(f"`bits={bits}` must be 4 or 8.")
    chosen = [p for p in linear_weights(variant.parameters, names) if ".lora_" not in p.name]
    if any(p.trainable for p in chosen):
        raise ValueError("Weights that are trained can't be quantized. Freeze them, for example with `with_lora`.")
    before = sum(p.numel * p.itemsize for p in chosen)
    after = sum(quantized_bytes(p, bits, double_quantization) for p in chosen)
    in_use = max((p.numel * 2 for p in chosen), default=0)  # dequantized to half precision

    def change(breakdown: MemoryBreakdown, uses_weights: bool) -> MemoryBreakdown:
        weights = breakdown.get(Category.PARAMETER) - before + after
        temporary = breakdown.get(Category.TEMPORARY) + (in_use if uses_weights else 0)
        return breakdown.replace(Category.PARAMETER, weights).replace(Category.TEMPORARY, temporary)

    phases = {name: change(breakdown, name != "step") for name, breakdown in variant.phases.items()}
    return replace(variant, phases=phases)


def quantized_bytes(parameter: ParameterInfo, bits: int, double_quantization: bool = True) -> int:
    """Bytes of one quantized weight with its scales."""
    n = parameter.numel
    if bits == 8:
        rows = parameter.shape[0] if parameter.shape else 0
        return n + 4 * rows
    scales = -(-n // _BLOCK_4BIT)
    scale_bytes = scales + 4 * -(-scales // _DOUBLE_BLOCK) if double_quantization else 4 * scales
    return -(-n // 2) + scale_bytes
