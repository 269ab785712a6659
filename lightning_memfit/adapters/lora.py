"""Inject low-rank adapters of peft (Hu et al., 2021, arXiv 2106.09685) into any module, and merge or remove them."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from lightning_memfit.adapters.linears import exchange, is_conv1d

NAME = "default"
"""Name of the adapter; peft's default."""


def inject(
    module: nn.Module,
    targets: Collection[str],
    rank: int,
    alpha: float,
    dropout: float,
    fake_dtype: torch.dtype = torch.float32,
) -> None:
    """Freeze a module and add trainable adapters to its linear layers, in place.

    Adapters are made in float32 on the device of the layers.

    Args:
        module: Any module without adapters.
        targets: Dotted names of the layers.
        rank: Inner width of the adapters.
        alpha: Scale: the adapters' outputs are multiplied by `alpha / rank`.
        dropout: Dropout probability of the adapters' inputs.
        fake_dtype: Dtype of adapters in a module of fake tensors, which no precision plugin converts later.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    config = LoraConfig(
        r=rank,
        lora_alpha=cast(int, alpha),  # it may be any number
        lora_dropout=dropout,
        target_modules=list(targets),
    )
    fake = is_fake(module)
    with warnings.catch_warnings(), _never_moved() if fake else nullcontext():
        # peft corrects `fan_in_fan_out` for each layer by itself.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        LoraModel(module, config, NAME)
    del module.peft_config  # it is for peft's way of loading adapters; ours are in checkpoints
    for layer in adapted_layers(module).values() if fake else ():
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            part.weight = nn.Parameter(torch.empty_like(part.weight, dtype=fake_dtype))


@contextmanager
def _never_moved() -> Iterator[None]:
    """Make `nn.Module.to` do nothing, as it can't exchange the parameters of modules of fake tensors."""
    before = nn.Module.to
    nn.Module.to = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.to = before  # type: ignore[method-assign]


def is_fake(module: nn.Module) -> bool:
    """Whether a module has fake tensors, as in a trace."""
    return any(is_fake_tensor(parameter) for parameter in module.parameters())


def is_fake_tensor(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by dotted name."""
    from peft.tuners.lora import LoraLayer

    return {name: child for name, child in module.named_modules() if isinstance(child, LoraLayer)}


def adapter_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The adapters' weights."""
    for layer in adapted_layers(module).values():
        yield layer.lora_A[NAME].weight
        yield layer.lora_B[NAME].weight


@torch.no_grad()
def remove(module: nn.Module) -> None:
    """Restore a module's own layers, with the trained adapters added to their weights."""
    for layer in adapted_layers(module).values():
        base = layer.get_base_layer()
        first, second = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        assert not getattr(base, "is_quantized_linear", False), "quantized layers are taken out before adapters"
        add_product(base.weight, first, second, layer.scaling[NAME], is_conv1d(base))
        exchange(module, layer, base)


@torch.no_grad()
def add_product(weight: Tensor, first: Tensor, second: Tensor, scale: float, transposed: bool) -> None:
    """Add `scale * second @ first` to a weight, in float32 and rounded once.

    Args:
        weight: `(out, in)`, or `(in, out)` where `transposed`.
        first: The adapter's inner weight, `(rank, in)`.
        second: The adapter's outer weight, `(out, rank)`.
        scale: Scale of the adapter.
        transposed: Whether the weight is that of a `Conv1D`.
    """
    if is_fake_tensor(second) or not bool(second.any()):
        return  # keeps bits as they are, where 0 would be added to -0
    device = weight.device
    change = scale * (second.to(device, torch.float32) @ first.to(device, torch.float32))
    weight.copy_(weight.float() + (change.t() if transposed else change))


def merge_into(weights: dict[str, Tensor], adapters: Mapping[str, Tensor], layers: Mapping[str, "LayerRecord"]) -> None:
    """Merge adapters into a plain state dictionary, in place.

    Args:
        weights: Weights by their names in a module without adapters.
        adapters: Adapter weights by their names in a module with adapters.
        layers: Result of `layer_records` for the module with adapters.
    """
    for name, record in layers.items():
        first, second = (adapters[f"{name}.lora_{part}.{NAME}.weight"] for part in "AB")
        add_product(weights[f"{name}.weight"], first, second, record["scale"], record["transposed"])


class LayerRecord(TypedDict):
    """Description of one adapter in a checkpoint."""

    scale: float
    transposed: bool
    """Whether the layer is a `Conv1D`, whose weight is `(in, out)`."""


def layer_records(module: nn.Module) -> dict[str, LayerRecord]:
    """Describe the adapters of a module."""
    return {
        name: LayerRecord(scale=float(layer.scaling[NAME]), transposed=_is_transposed(layer.get_base_layer()))
        for name, layer in adapted_layers(module).items()
    }


def _is_transposed(base: nn.Module) -> bool:
    return is_conv1d(base) or bool(getattr(base, "was_conv1d", False))
