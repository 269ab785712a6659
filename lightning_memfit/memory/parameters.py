"""`ParameterInfo`: the table of a module's parameters, from which sizes of states, gradients and shards follow."""

import re
from collections.abc import Collection
from dataclasses import dataclass

_IN_BLOCK = re.compile(r"(.+?\.\d+)\.")
"""Names of parameters of repeated blocks; the group is the block."""


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


def block_bytes(parameters: Collection[ParameterInfo]) -> dict[str, int]:
    """Bytes of the parameters of each repeated block, and of those outside under the empty name; tied ones once."""
    groups: dict[str, int] = {}
    for parameter in parameters:
        if not parameter.shared_with:
            match = _IN_BLOCK.match(parameter.name)
            key = match[1] if match else ""
            groups[key] = groups.get(key, 0) + parameter.numel * parameter.itemsize
    return groups
