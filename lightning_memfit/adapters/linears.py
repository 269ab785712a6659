"""Find the linear layers of a module that can get adapters or be quantized, and exchange them."""

import difflib
from collections.abc import Collection
from typing import Any

from torch import nn

AUTO = "auto"


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the `Conv1D` of transformers: a linear layer whose weight is `(in, out)`."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer; a subclass is not, as it may compute something else."""
    return type(module) is nn.Linear or is_conv1d(module) or bool(getattr(module, "is_quantized_linear", False))


def linear_layers(module: nn.Module, names: str | Collection[str] = AUTO) -> dict[str, nn.Module]:
    """Linear layers by dotted name.

    Args:
        module: Any module.
        names: `auto` for all but output heads; else last parts of dotted names such as `c_attn` or `self_attn.q_proj`.

    Raises:
        ValueError: If the module has no such layer, or a name fits none.
    """
    heads = output_heads(module)
    found = {name: child for name, child in module.named_modules() if name and is_linear(child)}
    if names == AUTO:
        chosen = {name: child for name, child in found.items() if id(child) not in heads}
        if not chosen:
            raise ValueError(f"{type(module).__name__} has no linear layer (nn.Linear or Conv1D) besides its heads.")
        return chosen
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if not any(_fits(full, name) for full in found):
            known = sorted({full.rpartition(".")[2] for full in found})
            closest = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
            raise ValueError(
                f"{name!r} is the end of no linear layer's name in {type(module).__name__}. Closest: "
                f"{', '.join(closest) or 'none'}."
            )
    return {full: child for full, child in found.items() if any(_fits(full, name) for name in wanted)}


def _fits(full: str, name: str) -> bool:
    return full == name or full.endswith(f".{name}")


def output_heads(module: nn.Module) -> set[int]:
    """Ids of the layers that make a model's outputs: those named by Hugging Face models, and those tied to embeddings.

    A linear layer after the last repeated block is not a head for that reason alone: adapters work there, too.
    """
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    heads = {id(child) for child in module.modules() if is_linear(child) and id(child.weight) in embeddings}
    for child in module.modules():
        if any(
            cls.__name__ == "PreTrainedModel" for cls in type(child).__mro__
        ):  # others may mean something else by it
            heads.add(id(child.get_output_embeddings()))  # type: ignore[operator]
    return heads


def tied_weights(module: nn.Module, layers: Collection[Any]) -> list[str]:
    """Names of the layers' weights that other layers share."""
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    weights = (layer.weight for layer in layers)
    return [" = ".join(owners[id(w)]) for w in weights if len(owners.get(id(w), ())) > 1]


def exchange(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another at every place in `module` where it occurs."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new
