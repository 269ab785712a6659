"""Adapters and quantized weights as they ought to be, by hooks and plain arithmetic on a module of one's own."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

Found = dict[str, tuple[Tensor, Tensor, float, int | None]]
"""By a layer's name: inner and outer weight, scale, and bits of its own weight (None if it isn't quantized)."""


class Adapters(pl.Callback):
    """Copies what adapters a run has, before its first step."""

    def __init__(self) -> None:
        self.found: Found = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, child in adapted(pl_module).items():
            pair = (child.lora_A["default"].weight, child.lora_B["default"].weight)
            a, b = (one.detach().clone() for one in pair)
            bits = None if child.codes is None else child.codes.bits
            self.found[name] = (a.float(), b.float(), float(child.lora_scale), bits)


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
    """Adapters that hooks add to the outputs of a module's layers, whose own weights are frozen.

    Args:
        module: The module; parameters are added to it, as `adapters_by_hand`.
        found: What adapters there are.
    """

    def __init__(self, module: nn.Module, found: Found) -> None:
        self.module = module
        module.requires_grad_(False)
        layers = {name: module.get_submodule(name) for name in found}
        self.originals: dict[str, Tensor] = {}
        self.pairs: dict[str, tuple[nn.Parameter, nn.Parameter, float]] = {}
        for name, (a, b, scale, bits) in found.items():
            layer: Any = layers[name]
            self.originals[name] = layer.weight.detach().clone()
            if bits:
                turned = _is_turned(layer)
                weight = rounded(layer.weight.detach().t() if turned else layer.weight.detach(), bits)
                layer.weight.data = weight.t().contiguous() if turned else weight
            first, second = nn.Parameter(a.clone()), nn.Parameter(b.clone())
            self.pairs[name] = (first, second, scale)
            layer.register_forward_hook(_adding(first, second, scale))
        module.adapters_by_hand = nn.ParameterList([one for pair in self.pairs.values() for one in pair[:2]])

    def merged(self) -> dict[str, Tensor]:
        """All weights as they are when the adapters are added to the original ones."""
        states = self.module.state_dict().items()
        state = {n: v.detach().clone() for n, v in states if not n.startswith("adapters_by_hand.")}
        for name, (first, second, scale) in self.pairs.items():
            change = scale * second.detach() @ first.detach()
            turned = _is_turned(self.module.get_submodule(name))
            state[f"{name}.weight"] = self.originals[name] + (change.t() if turned else change)
        return state


def _is_turned(layer: nn.Module) -> bool:
    """Whether a layer keeps its weight as `(in, out)`."""
    return type(layer).__name__ == "Conv1D"


def _adding(first: Tensor, second: Tensor, scale: float) -> Callable[..., Tensor]:
    def hook(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + scale * (args[0] @ first.t() @ second.t())

    return hook


def rounded(weight: Tensor, bits: int) -> Tensor:
    """What is left of an `(out, in)` weight after storing it in few bits."""
    if bits == 8:
        scale = weight.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
        return (weight / scale).round() * scale
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(weight.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4")
    found: Tensor = dequantize_4bit(codes, state)
    return found.to(weight.dtype)
