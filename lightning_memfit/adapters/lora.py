"""Put adapters of peft into a module, find them, and take them out again, merged into the weights."""

import re
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_memfit.adapters.checkpoint import merged
from lightning_memfit.adapters.linears import quantized_bits
from lightning_memfit.memory.conversion import StaysFloat32, default_dtype

NAME = "default"
"""peft's name for the adapters."""


class _Factor(StaysFloat32, nn.Linear):
    """Half of an adapter: float32 in every precision, computing in that of its input.

    peft keeps adapters of half-precision weights in float32, too, but has a float32 copy of the layer's input for it.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def inject(
    module: nn.Module, names: Iterable[str], rank: int, alpha: float, dropout: float, stay_float32: bool
) -> None:
    """Freeze a module and put adapters on the linear layers of these dotted names, in place.

    With `stay_float32` they keep it where the module is converted to half precision.
    """
    targets = "|".join(re.escape(f"root.{name}") for name in names)
    scale: Any = alpha  # which peft calls an integer
    config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=dropout, target_modules=targets)
    # A LightningModule has a `_device_mesh` and maybe a `config`, which mean something else to peft.
    root = nn.ModuleDict({"root": module})
    with warnings.catch_warnings(), default_dtype(torch.float32 if stay_float32 else None):
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # peft sees to it for each layer
        inject_adapter_in_model(config, root, NAME)
    if stay_float32:
        for layer in adapted_layers(module).values():
            layer.cast_input_dtype_enabled = False
            for factor in (layer.lora_A[NAME], layer.lora_B[NAME]):
                factor.float().__class__ = _Factor
    for child in module.modules():  # their fast path of evaluation reads the weights of layers past the adapters
        if isinstance(child, nn.TransformerEncoderLayer):
            child.activation_relu_or_gelu = 0
        elif isinstance(child, nn.TransformerEncoder):
            child.use_nested_tensor = False


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by dotted name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, LoraLayer)}


def adapter_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The adapters' weights."""
    layers = adapted_layers(module).values()
    return [factor[NAME].weight for layer in layers for factor in (layer.lora_A, layer.lora_B)]


def describe(module: nn.Module) -> dict[str, Any]:
    """What a checkpoint says of a module's adapters."""
    layers = adapted_layers(module)
    first = next(iter(layers.values()))
    return {
        "rank": first.r.get(NAME),
        "alpha": first.lora_alpha.get(NAME),
        "bits": max(quantized_bits(layer.get_base_layer()) for layer in layers.values()) or None,
        "layers": sorted(layers),
    }


def merge(module: nn.Module) -> None:
    """Give a module its own layers back, with what was learned in their weights. What was frozen stays so."""
    weights = []
    for name, layer in adapted_layers(module).items():
        factors = (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
        base = layer.get_base_layer()
        weights.append((name, base, merged(name, base, base.weight, *factors, layer.scaling[NAME])))
    for name, base, weight in weights:
        base.weight.data = weight
        module.set_submodule(name, base)
