"""Types of weights: that in which modules are built, that in which each is stored, and values that stay in float32."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_memfit.memory.parameters import ParameterInfo


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set torch's default dtype for a while, as Lightning's `*-true` precisions do while a module builds itself.

    Args:
        dtype: The dtype; None leaves it as it is.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class StaysFloat32(nn.Module):
    """Goes to another device, and to float64, with the module that it is part of, but not to 16 bits.

    For small values that many small ones are added to, such as sums over batches or trained adapters: Lightning's
    `bf16-true` and `16-true` convert all that a module holds, and what is added would be rounded away.
    """

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            if torch.promote_types(converted.dtype, torch.float32) == converted.dtype:
                return converted
            return tensor.to(converted.device)

        applied: nn.Module = super()._apply(convert, *args, **kwargs)  # type: ignore[no-untyped-call]
        return applied


def not_converted(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Return the parameters and buffers that `module.to(dtype)` leaves in their own dtype."""
    if torch.promote_types(dtype, torch.float32) == dtype:
        return []
    keeping = [child for child in module.modules() if isinstance(child, StaysFloat32)]
    return [tensor for child in keeping for tensor in (*child.parameters(), *child.buffers())]


def parameter_table(module: nn.Module, dtype: torch.dtype | None = None) -> tuple[ParameterInfo, ...]:
    """Every parameter with its stored size; tied ones name the first, those that ZeRO-3 has partitioned count whole.

    Args:
        module: Not changed.
        dtype: Count floating parameters as after `module.to(dtype)`.
    """
    first_name: dict[int, str] = {}
    kept = set() if dtype is None else {id(tensor) for tensor in not_converted(module, dtype)}
    table = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared = first_name.get(id(parameter), "")
        first_name.setdefault(id(parameter), name)
        is_converted = parameter.is_floating_point() and id(parameter) not in kept
        size = dtype.itemsize if dtype and is_converted else parameter.element_size()
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        info = ParameterInfo(name, prod(shape), size, parameter.requires_grad, len(shape), shared, shape)
        table.append(info)
    return tuple(table)


_IN_BLOCK = re.compile(r"(.+?\.\d+)\.")
"""Names of parameters of repeated blocks; the group is the block."""


def bytes_by_block(parameters: Iterable[ParameterInfo]) -> dict[str, int]:
    """Bytes of the parameters of each repeated block, and of those outside under the empty name; tied ones once."""
    groups = Counter[str]()
    for parameter in parameters:
        if not parameter.shared_with:
            match = _IN_BLOCK.match(parameter.name)
            groups[match[1] if match else ""] += parameter.numel * parameter.itemsize
    return dict(groups)
