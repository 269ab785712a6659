"""Low-rank adapters (Hu et al., 2021, arXiv 2106.09685) on the linear layers of any module: inject, merge, remove."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypedDict

import torch
from torch import Tensor, nn

from lightning_memfit.adapters.layer import (
    NAME,
    FrozenLinear,
    add_adapter,
    drop_adapter,
    is_conv1d,
    is_fake_tensor,
    share_adapter,
    sum_with_product,
)
from lightning_memfit.adapters.linears import weight_of


def inject(
    module: nn.Module,
    layers: Iterable[nn.Module],
    rank: int,
    alpha: float,
    dropout: float,
) -> None:
    """Freeze a module and add trainable adapters to its linear layers, in place.

    Adapters are in float32, on the device of the layers, and stay so when the module is converted. Layers that have
    their weight in common get one adapter.

    Args:
        module: Any module without adapters.
        layers: Some of its linear layers.
        rank: Inner width of the adapters.
        alpha: Scale: the adapters' outputs are multiplied by `alpha / rank`.
        dropout: Dropout probability of the adapters' inputs.
    """
    module.requires_grad_(False)
    for frozen in frozen_layers(module).values():
        frozen.raw.requires_grad_(False)  # one that waits is no part of the module
    first: dict[int, FrozenLinear] = {}
    for layer in layers:
        weight = id(weight_of(layer))
        if weight in first:
            share_adapter(layer, first[weight])
        else:
            first[weight] = add_adapter(layer, rank, alpha / rank, dropout)


def is_fake(module: nn.Module) -> bool:
    """Whether a module has fake tensors, as in a trace."""
    return any(is_fake_tensor(parameter) for parameter in module.parameters())


def frozen_layers(module: nn.Module) -> dict[str, FrozenLinear]:
    """The layers that have an adapter or are quantized, by dotted name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, FrozenLinear)}


def adapted_layers(module: nn.Module) -> dict[str, FrozenLinear]:
    """The layers that have an adapter, by dotted name."""
    return {name: layer for name, layer in frozen_layers(module).items() if layer.lora_A is not None}


def adapter_parameters(module: nn.Module) -> Iterator[Tensor]:
    """The adapters' weights."""
    for layer in adapted_layers(module).values():
        yield from layer.factors()


@torch.no_grad()
def remove(module: nn.Module) -> None:
    """Restore a module's own layers, with the trained adapters added to their weights."""
    merged: set[int] = set()
    for layer in adapted_layers(module).values():
        weight = layer.raw
        if id(weight) not in merged:
            merged.add(id(weight))
            add_product(weight, *layer.factors(), layer.lora_scale, is_conv1d(layer))
        drop_adapter(layer)


@torch.no_grad()
def add_product(weight: Tensor, first: Tensor, second: Tensor, scale: float, transposed: bool) -> None:
    """Add `scale * second @ first` to a weight, in float32 and rounded once; arguments as in `sum_with_product`."""
    merged = sum_with_product(weight, first, second, scale, transposed)
    if merged is not weight:
        weight.copy_(merged)


def merge_into(weights: dict[str, Tensor], adapters: Mapping[str, Tensor], layers: Mapping[str, LayerRecord]) -> None:
    """Merge adapters into a plain state dictionary, in place.

    Args:
        weights: Weights by their names in a module without adapters.
        adapters: Adapter weights by their names in a module with adapters.
        layers: Result of `layer_records` for the module with adapters.
    """
    for name, record in layers.items():
        if record.get("shared_with") is None:
            first, second = (adapters[f"{name}.lora_{part}.{NAME}.weight"] for part in "AB")
            add_product(weights[f"{name}.weight"], first, second, record["scale"], record["transposed"])


class _Layer(TypedDict):
    scale: float
    transposed: bool
    """Whether the layer is a `Conv1D`, whose weight is `(in, out)`."""


class LayerRecord(_Layer, total=False):
    """Description of one adapter in a checkpoint."""

    shared_with: str
    """Layer that has the same weight and adapter, if it comes first."""


def layer_records(module: nn.Module) -> dict[str, LayerRecord]:
    """Describe the adapters of a module."""
    records: dict[str, LayerRecord] = {}
    first: dict[int, str] = {}
    for name, layer in adapted_layers(module).items():
        records[name] = LayerRecord(scale=float(layer.lora_scale), transposed=is_conv1d(layer))
        earlier = first.setdefault(id(layer.raw), name)
        if earlier != name:
            records[name]["shared_with"] = earlier
    return records
