"""`QuantizedWeights`: frozen linear weights in 4 or 8 bits, for training adapters on top."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_memfit.adapters.linears import AUTO, exchange, linear_layers, tied_weights
from lightning_memfit.adapters.quantized import QuantizedLinear
from lightning_memfit.memory import Category
from lightning_memfit.memory.host import keep_on_host, return_to_device
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.facts import Run, run_of
from lightning_memfit.techniques.core.technique import Options
from lightning_memfit.techniques.core.wrapping import wrap_method


class QuantizedWeights(TechniqueCallback):
    """Store the weights of linear layers in 4 bits (NF4, double quantization) or 8 bits (one scale per row).

    Only for weights that are not trained: list `Lora` after it. `Conv1D` layers of GPT-2 are quantized as the equal
    `nn.Linear`. Embeddings, norms and output heads, including tied ones, stay as they are. The original weights wait in
    host memory and are put back when the run ends, so that adapters are merged into them.

    Args:
        bits: 4 or 8.
        target_modules: Ends of the dotted names of the layers; `auto` takes every linear layer except output heads.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
        ValueError: If `bits` is neither 4 nor 8.
    """

    def __init__(self, bits: int = 4, target_modules: str | Sequence[str] = AUTO) -> None:
        super().__init__()
        if bits not in (4, 8):
            raise ValueError(f"`bits={bits}` must be 4 or 8.")
        if bits == 4 and find_spec("bitsandbytes") is None:
            raise ModuleNotFoundError("QuantizedWeights needs bitsandbytes: pip install 'bitsandbytes>=0.49,<0.51'")
        self.bits = bits
        self.target_modules = target_modules

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot work and wrap `configure_model`, after which the model is complete."""
        reason = unsupported(run_of(trainer, pl_module))
        if reason is not None:
            raise ValueError(f"QuantizedWeights: {reason}")

        def configure(inner: Callable[[], Any]) -> None:
            inner()
            self._quantize(pl_module)

        self.on_restore(wrap_method(pl_module, "configure_model", configure))

    def _quantize(self, module: nn.Module) -> None:
        layers = linear_layers(module, self.target_modules)
        tied = tied_weights(module, layers.values())
        if tied:
            raise ValueError(
                f"QuantizedWeights: {tied[0]} is one weight of several layers and can't be quantized for one of them. "
                "Leave it out of `target_modules`."
            )
        before = sum(layer.weight.nbytes for layer in layers.values())  # type: ignore[misc]
        after = 0
        for layer in layers.values():
            quantized = QuantizedLinear(layer, self.bits)
            exchange(module, layer, quantized)
            wait_on_host(layer, quantized.weight)
            self.on_restore(partial(_put_back, module, quantized, layer))
            after += sum(t.nbytes for t in (quantized.weight, *quantized.buffers()))
        self.announce(f"{len(layers)} layers in {self.bits} bits, {before / after:.1f} times smaller")


def wait_on_host(layer: nn.Module, serves: torch.Tensor) -> None:
    """Move a layer's weight, but not the bias it shares, out of the device's memory."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    weight.data = weight.data.cpu()
    keep_on_host(weight, Category.PARAMETER, serves)


def _put_back(module: nn.Module, quantized: nn.Module, layer: nn.Module) -> None:
    """Give the module its layer again, on the device and in the precision that the rest of the module has now."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    rest = next((p for p in module.parameters() if p.is_floating_point()), weight)
    return_to_device(weight)
    weight.data = weight.data.to(rest.device, rest.dtype)
    exchange(module, quantized, layer)


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if weights can be quantized."""
    if not run.has("Lora"):
        return "quantized weights can't be trained, and nothing else is. List Lora after it."
    if run.callbacks.index("Lora") < run.callbacks.index("QuantizedWeights"):
        return "Lora stands before it, so that adapters would be quantized. List QuantizedWeights first."
    return None
