"""`ParameterInfo`: the table of a module's parameters, from which sizes of states, gradients and shards follow."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

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


def groups_of(optimizer: Optimizer) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Package and class, as `torch.AdamW`, and hyper-parameters of each parameter group."""
    cls = type(optimizer)
    name = f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
    return tuple((name, {key: v for key, v in group.items() if key != "params"}) for group in optimizer.param_groups)
