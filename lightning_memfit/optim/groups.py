"""Parameter groups with weight decay only where it belongs."""

from typing import Any

import torch
from torch import nn


def weight_decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of a module into a decayed and an undecayed group.

    Not decayed: biases, every parameter that a normalization module owns (any class with "Norm" in its name: LayerNorm,
    RMSNorm, GroupNorm, BatchNorm, ...) and everything with fewer than two dimensions. Embeddings **are** decayed, as in
    nanoGPT (`configure_optimizers` decays whatever has two dimensions or more) and in the Hugging Face Trainer
    (`get_decay_parameter_names`): a head tied to them is a weight matrix like any other.

    Args:
        module: Its parameters are taken once each, tied ones under the first name they appear by.
        weight_decay: For the decayed group; the other group gets 0.

    Returns:
        Groups for the constructor of a `torch.optim` optimizer, empty ones left out.

    Raises:
        ValueError: If `weight_decay` is negative or nothing in the module is trainable.
    """
    if weight_decay < 0:
        raise ValueError(f"`weight_decay={weight_decay}` must not be negative.")
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    seen: set[int] = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            (decayed if _is_decayed(owner, name, parameter) else undecayed).append(parameter)
    if not seen:
        raise ValueError(f"`module` ({type(module).__name__}) has no parameter with requires_grad=True to optimize.")
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _is_decayed(owner: nn.Module, name: str, parameter: torch.Tensor) -> bool:
    is_bias = name == "bias" or name.endswith("_bias")
    is_norm = "norm" in type(owner).__name__.lower()
    shape = getattr(parameter, "ds_shape", parameter.shape)  # what ZeRO-3 has partitioned looks like an empty vector
    return len(shape) >= 2 and not is_bias and not is_norm
