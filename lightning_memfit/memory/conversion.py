"""Types of weights: that in which modules are built, and values that stay in float32 when they are converted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override


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
