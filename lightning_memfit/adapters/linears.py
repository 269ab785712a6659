"""Find the linear layers of a module that can get adapters or be quantized."""

from collections import Counter
from collections.abc import Collection

import torch
from torch import nn
from torch.nn import Linear  # the class itself, which precisions of Lightning replace in `torch.nn` for a while
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

AUTO = "auto"
_BITS = {"Linear4bit": 4, "Linear8bitLt": 8}


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, a linear layer whose weight is `(in, out)`."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") for kind in type(module).__mro__
    )


def quantized_bits(module: nn.Module) -> int:
    """Bits of a linear layer of bitsandbytes, which has frozen codes for a weight; 0 for any other module."""
    return next((_BITS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _BITS), 0)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer; any other subclass is not, as it may compute something else."""
    return type(module) is Linear or is_conv1d(module) or quantized_bits(module) > 0


UNFIT = "the layer or its weight is used in two places, computed from other parameters, replaced, or no plain matrix"


def linear_layers(module: nn.Module, names: str | Collection[str] = AUTO) -> tuple[dict[str, nn.Module], list[str]]:
    """Linear layers by dotted name, and the names of those that `auto` leaves out as `UNFIT`.

    Args:
        module: A module without adapters.
        names: `auto` for all but output heads; else last parts of dotted names such as `c_attn` or `self_attn.q_proj`.

    Raises:
        ValueError: If the module has no such layer, a name fits none, or a layer that is named can't be changed.
    """
    linear = {name: child for name, child in module.named_modules(remove_duplicate=False) if name and is_linear(child)}
    wanted = [names] if isinstance(names, str) else list(names)
    heads = _output_heads(module)
    chosen = {
        name: layer
        for name, layer in linear.items()
        if (id(layer) not in heads if names == AUTO else any(f".{name}".endswith(f".{end}") for end in wanted))
    }
    every = (module.named_modules, module.named_parameters, module.named_buffers)
    times = Counter(id(one) for named in every for _, one in named(remove_duplicate=False))
    left_out = [name for name, layer in chosen.items() if not _is_plain(layer, times)]
    if left_out and names != AUTO:
        raise ValueError(f"{left_out[0]} stays as it is: {UNFIT}. Leave it out of `target_modules`.")
    missing = (
        [] if names == AUTO else [end for end in wanted if not any(f".{one}".endswith(f".{end}") for one in chosen)]
    )
    if missing or len(left_out) == len(chosen):
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        raise ValueError(
            f"{type(module).__name__} has no linear layer for {missing[0] if missing else names!r}. Its nn.Linear and "
            f"Conv1D (no subclasses, which may compute something else) are named: {ends}."
        )
    return {name: layer for name, layer in chosen.items() if name not in left_out}, left_out


def _is_plain(layer: nn.Module, times: Counter[int]) -> bool:
    """Whether another layer can take the place of one without changing what others compute."""
    weight = layer._parameters.get("weight")
    if not isinstance(weight, nn.Parameter) or "forward" in vars(layer) or times[id(layer)] > 1:
        return False
    if quantized_bits(layer):
        return True
    shape = getattr(weight, "ds_shape", weight.shape)  # of all ranks together under ZeRO-3
    is_tensor = weight.layout is torch.strided and not is_traceable_wrapper_subclass(weight)
    return is_tensor and len(shape) == 2 and weight.is_floating_point() and times[id(weight)] == 1


def _output_heads(module: nn.Module) -> set[int]:
    """Ids of the layers that make a model's outputs: those named by Hugging Face models, and those tied to embeddings.

    A linear layer after the last repeated block is not a head for that reason alone: adapters work there, too.
    """
    children = list(module.modules())
    embeddings = {id(child.weight) for child in children if isinstance(child, nn.Embedding)}
    heads = {id(one) for one in children if is_linear(one) and id(one._parameters.get("weight")) in embeddings}
    for child in children:
        if any(kind.__name__ == "PreTrainedModel" for kind in type(child).__mro__):  # others may mean something else
            heads.add(id(child.get_output_embeddings()))  # type: ignore[operator]
    return heads
