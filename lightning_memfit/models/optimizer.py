"""Choosing a torch optimizer by name."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import torch

_SET_ELSEWHERE = {"lr": "learning_rate", "weight_decay": "weight_decay"}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class of a name in `torch.optim` or of an import path.

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
    """Return the options, with lists made tuples, as torch's own defaults are.

    Raises:
        ValueError: If an option has an argument of its own.
    """
    for key, argument in _SET_ELSEWHERE.items():
        if key in (options or {}):
            raise ValueError(f"`optimizer_options.{key}` is set by `{argument}`. Give it there, and once.")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}
