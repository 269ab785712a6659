"""Find the linear layers of a module that can get adapters or be quantized, and say why others can't."""

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


def linear_layers(
    module: nn.Module, names: str | Collection[str] = AUTO
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Linear layers by dotted name, and those that `auto` leaves out with the reason.

    Args:
        module: A module without adapters.
        names: `auto` for all but output heads; else last parts of dotted names such as `c_attn` or `self_attn.q_proj`.

    Raises:
        ValueError: If the module has no such layer, a name fits none, or a layer that is named can't be changed.
    """
    places: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if name and is_linear(child):
            places.setdefault(id(child), []).append(name)
    wanted, heads = [names] if isinstance(names, str) else list(names), output_heads(module)
    found: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    for identity, of_one in places.items():
        if identity in heads if names == AUTO else not any(_fits(full, name) for full in of_one for name in wanted):
            continue
        reason = _unfit(module, of_one)
        if reason is None:
            found[of_one[0]] = module.get_submodule(of_one[0])
        elif names == AUTO:
            left_out[of_one[0]] = reason
        else:
            raise ValueError(f"{of_one[0]}: {reason}. Leave it out of `target_modules`.")
    known = [full for of_one in places.values() for full in of_one]
    missing = [] if names == AUTO else [name for name in wanted if not any(_fits(full, name) for full in known)]
    if missing or not found:
        ends = ", ".join(sorted({full.rpartition(".")[2] for full in known})) or "none"
        raise ValueError(
            f"{type(module).__name__} has no linear layer for {missing[0] if missing else names!r}. Its nn.Linear and "
            f"Conv1D (no subclasses, which may compute something else) are named: {ends}."
        )
    return found, left_out


def _fits(full: str, name: str) -> bool:
    return full == name or full.endswith(f".{name}")


def _unfit(module: nn.Module, places: list[str]) -> str | None:
    """Why another layer can't take the place of one without changing what others compute, or None."""
    layer = module.get_submodule(places[0])
    weight = layer._parameters.get("weight")
    if len(places) > 1:
        return f"{' and '.join(places)} are one layer"
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from other parameters (weight_norm, spectral_norm)"
    if "forward" in vars(layer):
        return "its `forward` was replaced before"
    shape = getattr(weight, "ds_shape", weight.shape)  # of all ranks together under ZeRO-3
    if quantized_bits(layer):
        return None
    if len(shape) != 2 or not weight.is_floating_point():
        return f"its weight is {len(shape)}-dimensional, of {weight.dtype}"
    if is_traceable_wrapper_subclass(weight) or weight.layout is not torch.strided:
        return f"its weight is a {type(weight.data).__name__} of layout {weight.layout}, no plain tensor"
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    others = [name for name, tensor in tensors.items() if tensor is weight and name != f"{places[0]}.weight"]
    return f"{places[0]}.weight and {others[0]} are one weight" if others else None


def output_heads(module: nn.Module) -> set[int]:
    """Ids of the layers that make a model's outputs: those named by Hugging Face models, and those tied to embeddings.

    A linear layer after the last repeated block is not a head for that reason alone: adapters work there, too.
    """
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    heads = {
        id(child)
        for child in module.modules()
        if is_linear(child) and id(child._parameters.get("weight")) in embeddings
    }
    for child in module.modules():
        if any(kind.__name__ == "PreTrainedModel" for kind in type(child).__mro__):  # others may mean something else
            heads.add(id(child.get_output_embeddings()))  # type: ignore[operator]
    return heads
