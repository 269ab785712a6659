"""`ParameterInfo`: the table of a module's parameters, from which sizes of states, gradients and shards follow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the module."""

    name: str
    numel: int
    itemsize: int
    """Bytes per element as stored while training."""
    trainable: bool = True
    dims: int = 1
    """Number of dimensions; norms and biases have one."""
    shared_with: str = ""
    """Name of the parameter it is tied to, if any; tied parameters count once."""
    shape: tuple[int, ...] = ()


def trained(parameters: Collection[ParameterInfo]) -> list[ParameterInfo]:
    """Trainable parameters, tied ones once."""
    return [p for p in parameters if p.trainable and not p.shared_with]


_OPTION_TYPES = (bool, int, float, str, tuple, type(None))


def groups_of(optimizer: Optimizer) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Package and class, as `torch.AdamW`, and hyper-parameters of each kind of parameter group, tensors left out."""
    cls = type(optimizer)
    found: list[tuple[str, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if isinstance(value, _OPTION_TYPES)}
        entry = f"{cls.__module__.partition('.')[0]}.{cls.__name__}", options
        if entry not in found:
            found.append(entry)
    return tuple(found)
