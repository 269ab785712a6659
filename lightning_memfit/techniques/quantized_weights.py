"""`QuantizedWeights`: frozen linear weights in 4 or 8 bits, for training adapters on top."""

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, WeightAveraging
from torch import nn
from typing_extensions import override

from lightning_memfit.adapters.layer import FrozenLinear, dequantize, quantize
from lightning_memfit.adapters.linears import AUTO, linear_layers
from lightning_memfit.adapters.lora import adapted_layers, frozen_layers
from lightning_memfit.extras import require
from lightning_memfit.memory import Category
from lightning_memfit.memory.host import keep_on_host, return_to_device
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import Options


class QuantizedWeights(TechniqueCallback):
    """Store the weights of linear layers in 4 bits (NF4, double quantization) or 8 bits (one scale per row).

    Only for weights that are not trained: list `Lora` beside it. `Conv1D` layers of GPT-2 are quantized as the equal
    `nn.Linear`. Embeddings, norms and output heads, including tied ones, stay as they are. Whoever reads the weight of
    a quantized layer gets it dequantized. The original weights wait in host memory and are put back when the run ends,
    so that adapters are merged into them.

    Args:
        bits: 4 or 8.
        target_modules: Ends of the dotted names of the layers; `auto` takes every linear layer except output heads.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
        ValueError: If `bits` is neither 4 nor 8.
    """

    rules_traces = True

    def __init__(self, bits: int = 4, target_modules: str | Sequence[str] = AUTO) -> None:
        super().__init__()
        if bits not in (4, 8):
            raise ValueError(f"`bits={bits}` must be 4 or 8.")
        if bits == 4:
            require("bitsandbytes", "QuantizedWeights")
            # Not first within a trace: an error that this import catches and logs leads to the frames around it, and
            # who keeps the log keeps their tensors.
            import bitsandbytes.functional  # noqa: F401
        self.bits = bits
        self.target_modules = target_modules
        self._quantized: list[FrozenLinear] = []

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot work, and quantize once the module is complete."""
        reason = copied_before(self, trainer) or replaces_layers(trainer) or _refused_beside(trainer)
        if reason is not None:
            raise ValueError(f"QuantizedWeights: {reason}")

        def complete() -> None:
            if not any(layer.codes is not None for layer in frozen_layers(pl_module).values()):
                self._quantize(pl_module)

        self.when_complete(pl_module, complete)
        self.on_restore(lambda: self.put_back(self.has_failed))

    def _quantize(self, module: nn.Module) -> None:
        layers, left_out = linear_layers(module, self.target_modules, shared=False)
        trained = [name for name, layer in adapted_layers(module).items() if layer.raw.requires_grad and name in layers]
        if trained:
            raise ValueError(
                f"QuantizedWeights: {trained[0]} is trained as a whole (`train` of Lora). Give `target_modules` "
                "without it."
            )
        before = sum(layer.weight.nbytes for layer in layers.values())  # type: ignore[misc]
        after = 0
        for layer in layers.values():
            quantized = quantize(layer, self.bits)
            self._quantized.append(quantized)
            assert quantized.codes is not None
            wait_on_host(quantized.raw, quantized.codes.codes)
            after += sum(buffer.nbytes for buffer in quantized.codes.buffers())
        self.announce(f"{len(layers)} layers in {self.bits} bits, {before / after:.1f} times smaller")
        for name, reason in left_out.items():
            self.announce(f"{name} stays as it is: {reason}")

    def put_back(self, on_host: bool = False) -> None:
        """Give layers their weights again, in the precision that the rest of the module has now.

        Args:
            on_host: Leave them in host memory, where Lightning moves the whole module next, rather than move them to
                the module's device, which need not have room for them.
        """
        while self._quantized:
            layer = self._quantized.pop()
            if layer.waiting is None:
                continue
            weight, like = layer.waiting, layer.like
            return_to_device(weight)
            weight.data = weight.data.to(weight.device if on_host else like.device, like.dtype)
            dequantize(layer)


def wait_on_host(weight: torch.Tensor, serves: torch.Tensor) -> None:
    """Move a weight out of the device's memory."""
    weight.data = weight.data.cpu()
    keep_on_host(weight, Category.PARAMETER, serves)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, in their order."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def copied_before(callback: pl.Callback, trainer: pl.Trainer) -> str | None:
    """Reason and fix if a callback has copied the module in `setup` before this one could change it."""
    callbacks = callbacks_of(trainer)
    for other in callbacks[: callbacks.index(callback)]:
        if isinstance(other, WeightAveraging):
            ours, name = type(callback).__name__, type(other).__name__
            return f"{name} stands before it and has copied the module without what {ours} changes. List {name} last."
    return None


def replaces_layers(trainer: pl.Trainer) -> str | None:
    """Reason and fix if the precision replaces linear layers by others when the run begins."""
    names = {kind.__name__ for kind in type(trainer.precision_plugin).__mro__}
    for name in sorted(names & {"BitsandbytesPrecision", "TransformerEnginePrecision"}):
        return (
            f"{name} replaces linear layers by its own when the run begins, and what they had would be lost. Leave the "
            "plugin out (QuantizedWeights beside Lora stores frozen weights in 4 or 8 bits)."
        )
    return None


def _refused_beside(trainer: pl.Trainer) -> str | None:
    """Reason and fix if another callback would average codes or train what can't be trained."""
    for other in callbacks_of(trainer):
        name = type(other).__name__
        if isinstance(other, WeightAveraging) and other._use_buffers:
            return f"{name} would average codes, which stand for no numbers. Give it `use_buffers=False`."
        if isinstance(other, BaseFinetuning):
            return f"{name} unfreezes weights, and quantized ones can't be trained. Leave one of them out."
    return None


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if weights can be quantized."""
    if not run.has("Lora"):
        return "quantized weights can't be trained, and nothing else is. List Lora beside it."
    if run.callbacks.count("QuantizedWeights") > 1:
        return "there are two of it. Leave one out."
    return None
