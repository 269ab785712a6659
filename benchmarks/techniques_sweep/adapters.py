"""Adapters and quantized weights as they ought to be, by hooks and plain arithmetic on a module of one's own."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

Found = dict[str, tuple[Tensor, Tensor, float, int | None]]
"""By a layer's name: inner and outer weight, scale, and bits of its own weight (None if it isn't quantized)."""


class Adapters(pl.Callback):
    """Copies what adapters a run has, before its first step."""

    def __init__(self) -> None:
        self.found: Found = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, child in adapted(pl_module).items():
            a, b = (one["default"].weight.detach().clone().float() for one in (child.lora_A, child.lora_B))
            bits = {"Linear4bit": 4, "Linear8bit": 8}.get(type(child.get_base_layer()).__name__)
            self.found[name] = (a, b, child.scaling["default"], bits)


class CountedAdapters(Adapters):
    """Counts those without a gradient too. GradientRelease refuses a callback with such a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.unused = sum(child.lora_B["default"].weight.grad is None for child in adapted(pl_module).values())


def adapted(module: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by dotted name."""
    return {name: child for name, child in module.named_modules() if getattr(child, "lora_A", None) is not None}


class ByHand:
    """Adapters that torch's parametrizations add to the weights of a module's layers, whose own weights are frozen.

    Whatever the module does with a weight, it then does with the adapter, too.

    Args:
        module: The module; parameters are added to it.
        found: What adapters there are.
    """

    def __init__(self, module: nn.Module, found: Found) -> None:
        self.module = module
        module.requires_grad_(False)
        layers = {name: module.get_submodule(name) for name in found}
        self.originals: dict[str, Tensor] = {}
        self.added: dict[str, _Added] = {}
        own: dict[int, nn.Parameter] = {}
        places = {name: value.data_ptr() for name, value in module.state_dict().items()}
        self.aliases = {
            name: [alias for alias, place in places.items() if place == layer.weight.data_ptr()]
            for name, layer in layers.items()
        }
        for name, (a, b, scale, bits) in found.items():
            layer: Any = layers[name]
            self.originals[name] = layer.weight.detach().clone()
            turned = type(layer).__name__ == "Conv1D"  # which keeps its weight as `(in, out)`
            if bits:
                weight = rounded(layer.weight.detach().t() if turned else layer.weight.detach(), bits)
                layer.weight.data = weight.t().contiguous() if turned else weight
            first, second = (own.setdefault(id(one), nn.Parameter(one.clone())) for one in (a, b))
            self.added[name] = _Added(first, second, scale, turned)
        for name, added in self.added.items():
            parametrize.register_parametrization(layers[name], "weight", added, unsafe=True)

    def merged(self) -> dict[str, Tensor]:
        """All weights as they are when the adapters are added to the original ones."""
        states = self.module.state_dict().items()
        state = {n: v.detach().clone() for n, v in states if ".parametrizations." not in n}
        for name, added in self.added.items():
            for alias in self.aliases[name]:
                with torch.no_grad():
                    state[alias] = added(self.originals[name])
        return state


class _Added(nn.Module):
    """A weight with an adapter's product."""

    def __init__(self, first: nn.Parameter, second: nn.Parameter, scale: float, turned: bool) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.scale, self.turned = scale, turned

    def forward(self, weight: Tensor) -> Tensor:
        change = self.scale * self.second @ self.first
        return weight + (change.t() if self.turned else change)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """What is left of an `(out, in)` weight after storing it in few bits."""
    if bits == 8:
        codes, largest, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight.contiguous().half())
        return codes.to(weight.dtype) * largest.mul(1.0 / 127.0).unsqueeze(1).to(weight.dtype)
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(weight.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4")
    found: Tensor = dequantize_4bit(codes, state)
    return found.to(weight.dtype)
