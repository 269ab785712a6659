"""`QuantizedWeights`: frozen linear weights in 4 or 8 bits, for training adapters on top."""

from collections.abc import Collection, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn
from typing_extensions import override

from lightning_memfit.adapters.linears import AUTO, linear_layers, quantized_bits
from lightning_memfit.extras import require
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import Options

_AVERAGES = "it would average codes, which stand for no numbers."
_CONFLICTS = {
    "WeightAveraging": _AVERAGES,
    "EMAWeightAveraging": _AVERAGES,
    "BackboneFinetuning": "it unfreezes weights, and quantized ones can't be trained.",
}


class QuantizedWeights(TechniqueCallback):
    """Store the weights of linear layers in 4 bits (NF4, double quantization) or 8 bits (one scale per row).

    Only for weights that are not trained: list `Lora` beside it. `Conv1D` layers of GPT-2 are quantized as the equal
    `nn.Linear`. Embeddings, norms and output heads, including tied ones, stay as they are. The layers stay quantized
    when the run ends, as the adapters stay that were trained beside them.

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
        require("bitsandbytes", "QuantizedWeights")
        # Not first within a trace: an error that this import catches and logs leads to the frames around it, and who
        # keeps the log keeps their tensors.
        import bitsandbytes.functional  # noqa: F401

        self.bits = bits
        self.target_modules = target_modules

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Change nothing yet: `Lora` has the weights quantized before it adds its adapters."""

    def quantize(self, module: nn.Module, trained: Collection[int] = ()) -> None:
        """Replace the chosen layers; what was quantized before, such as by `BitsAndBytesConfig`, stays as it is.

        Raises:
            ValueError: If one of these is named in `target_modules`.
        """
        from lightning_memfit.adapters.quantized import quantized

        layers, left_out = linear_layers(module, self.target_modules)
        kept = {*trained, *_kept_in_float32(module)}
        whole = [name for name, layer in layers.items() if id(layer) in kept]
        if whole and self.target_modules != AUTO:
            raise ValueError(
                f"QuantizedWeights: {whole[0]} is trained as a whole (`train` of Lora), or transformers keeps it in "
                "float32. Leave it out of `target_modules`."
            )
        for name in whole:
            del layers[name]
        before = after = count = 0
        for name in list(layers):  # one by one: a layer goes when the one that stands for it has come
            layer: Any = layers.pop(name)
            if quantized_bits(layer):
                continue
            made = quantized(layer, self.bits)
            before, after = before + layer.weight.nbytes, after + made.weight.nbytes + layer.weight.numel() // 64
            module.set_submodule(name, made)
            del layer
            count += 1
        if count:
            self.announce(f"{count} layers in {self.bits} bits, {before / after:.1f} times smaller")
        if left_out or whole:
            self.announce(f"{', '.join([*left_out, *whole])} not in {self.bits} bits")


def _kept_in_float32(module: nn.Module) -> set[int]:
    """Ids of what a Hugging Face model leaves in float32, such as the second layers of T5's blocks."""
    found = set()
    for model in module.modules():
        names = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        found |= {id(part) for name, part in model.named_modules() if not names.isdisjoint(name.split("."))}
    return found


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, in their order."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if weights can be quantized."""
    if not run.has("Lora"):
        return "quantized weights can't be trained, and nothing else is. List Lora beside it."
    if run.callbacks.count("QuantizedWeights") > 1:
        return "there are two of it. Leave one out."
    return run.beside(_CONFLICTS)
