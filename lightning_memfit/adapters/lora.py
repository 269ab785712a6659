"""Put adapters of peft into a module, find them, and take them out again, merged into the weights."""

import re
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_memfit.adapters.linears import is_conv1d, replace_layers
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
    """Freeze a module and put adapters on some of its layers.

    Args:
        module: Changed in place.
        names: Dotted names of linear layers.
        rank: Inner width of the adapters.
        alpha: Their outputs are scaled by `alpha / rank`.
        dropout: Dropout of their inputs.
        stay_float32: Keep them in float32 where the module is converted to half precision.
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


def is_fake(module: nn.Module) -> bool:
    """Whether a module has fake tensors, as in a trace."""
    return any(isinstance(parameter, FakeTensor) for parameter in module.parameters())


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by dotted name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, LoraLayer)}


def adapter_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The adapters' weights."""
    layers = adapted_layers(module).values()
    return [factor[NAME].weight for layer in layers for factor in (layer.lora_A, layer.lora_B)]


@torch.no_grad()
def take_out(module: nn.Module) -> None:
    """Give a module its own layers back, with what was learned added to their weights in float32 and rounded once."""
    layers = adapted_layers(module)
    for layer in layers.values():
        base, a, b = layer.get_base_layer(), layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        add_product(base.weight, a, b, layer.scaling[NAME], is_conv1d(base))
    replace_layers(module, {id(layer): layer.get_base_layer() for layer in layers.values()})


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> None:
    """Add `scale * b @ a` to a weight of shape `(out, in)`, or `(in, out)` where it is transposed, in place."""
    left, right = (a.T, b.T) if transposed else (b, a)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    factors = (left.to(weight.device, dtype), right.to(weight.device, dtype))
    weight.copy_(weight.to(dtype, copy=True).addmm_(*factors, alpha=scale))
