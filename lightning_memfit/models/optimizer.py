"""Optimizers by name, the cosine schedule, and parameter groups with weight decay only where it belongs."""

import difflib
import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_SET_ELSEWHERE = {"lr": "learning_rate", "weight_decay": "weight_decay"}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class for a name in `torch.optim` or an import path.

    Raises:
        ValueError: If there is no such optimizer.
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name or "torch.optim"), class_name, None)
    except ImportError as error:
        raise ValueError(f"`optimizer={name!r}` cannot be imported: {error}.") from error
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    known = [key for key, value in vars(torch.optim).items() if isinstance(value, type) and key != "Optimizer"]
    closest = difflib.get_close_matches(class_name, known, n=3, cutoff=0.5) or sorted(known)
    raise ValueError(f"`optimizer={name!r}` is no optimizer of torch.optim. Closest: {', '.join(closest)}.")


def checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options with lists turned into tuples, like torch's own defaults.

    Raises:
        ValueError: If an option has an argument of its own.
    """
    for key, argument in _SET_ELSEWHERE.items():
        if key in (options or {}):
            raise ValueError(f"`optimizer_options.{key}` is set by `{argument}`. Give it there, and once.")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}


# --- the learning-rate schedule ---------------------------------------------------------------------------------------


def cosine_with_warmup(step: int, *, warmup_steps: int, total_steps: int, floor: float) -> float:
    """Return the factor of the peak learning rate at an optimizer step.

    It rises linearly to 1 over `warmup_steps` (step 0 already learns), then falls along half a cosine to `floor`,
    which is reached at `total_steps` and kept. Source: Loshchilov and Hutter, "SGDR", 2017, without restarts.

    Args:
        step: Number of optimizer steps done.
        warmup_steps: Optimizer steps of the linear rise.
        total_steps: Optimizer steps of the whole run.
        floor: Factor at the end, in [0, 1].
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


# --- parameter groups -------------------------------------------------------------------------------------------------


def weight_decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of a module into a decayed and an undecayed group.

    Not decayed: biases, every parameter that a normalization module owns (any class with "Norm" in its name: LayerNorm,
    RMSNorm, GroupNorm, BatchNorm, ...) and everything with fewer than two dimensions. Embeddings **are** decayed, as in
    nanoGPT (`configure_optimizers` decays whatever has two dimensions or more) and in the Hugging Face Trainer
    (`get_decay_parameter_names`): a head tied to them is a weight matrix like any other.

    Args:
        module: The module; each parameter is taken once, a tied one under the name that comes first.
        weight_decay: Weight decay of the decayed group; the other group gets 0.

    Returns:
        Non-empty groups for the constructor of a `torch.optim` optimizer.

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
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3's partitioned parameters look empty
    return len(shape) >= 2 and not is_bias and not is_norm
