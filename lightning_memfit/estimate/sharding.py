"""How large the groups of parameters are that a sharded step gathers at once."""

from __future__ import annotations

import re

from lightning_memfit.memory import MIB
from lightning_memfit.profile.record import ParameterInfo

NCCL_BYTES = 512 * MIB
"""What NCCL keeps on a device beside tensors; an assumption, as it depends on topology and version."""

_IN_BLOCK = re.compile(r"(.+?\.\d+)\.")
"""Names of parameters of repeated blocks; the group is the block."""


def largest_block_bytes(parameters: tuple[ParameterInfo, ...]) -> int:
    """Bytes of the largest group of parameters that a sharded step gathers at once.

    A group is a repeated block (`h.3.` in its names) or a tensor outside of all, such as an embedding.
    """
    groups: dict[str, int] = {}
    for parameter in parameters:
        if not parameter.shared_with:
            match = _IN_BLOCK.match(parameter.name)
            key = match[1] if match else parameter.name
            groups[key] = groups.get(key, 0) + parameter.numel * parameter.itemsize
    return max(groups.values(), default=0)
