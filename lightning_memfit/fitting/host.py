"""Copies of tensors in host memory, out of sight of the device's accounting.

`_disable_current_modes` is private torch API (there since 2.0): a simulated device is a dispatch mode, and what is
copied to "the host" must not count there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass


class HostCopy:
    """The values of one tensor, kept in host memory.

    Args:
        tensor: Any tensor; a sparse one or a subclass keeps its kind. Of a wrapper, such as a quantized optimizer
            state, the tensors inside are copied: few wrappers can be cloned.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._parts: dict[str, HostCopy] = {}
        self._wrap: Callable[[dict[str, Tensor]], Tensor] | None = None
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}  # a DTensor names its mesh, too
            self._parts = {name: HostCopy(part) for name, part in parts.items() if isinstance(part, Tensor)}
            others = {name: part for name, part in parts.items() if name not in self._parts}
            self._wrap = partial(_wrapped, type(tensor), others, context, tensor.size(), tensor.stride())
            return
        with _disable_current_modes(), torch.no_grad():
            self._values = tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()

    def restore(self, tensor: Tensor) -> None:
        """Write the values back, in place."""
        for name, part in self._parts.items():
            part.restore(getattr(tensor, name))
        if not self._parts:
            with _disable_current_modes(), torch.no_grad():
                tensor.detach().copy_(self._values)

    def moved_to(self, device: torch.device) -> Tensor:
        """A new tensor with the values, on a device."""
        if self._wrap is not None:
            return self._wrap({name: part.moved_to(device) for name, part in self._parts.items()})
        return self._values.clone() if device.type == "cpu" else self._values.to(device)


def _wrapped(
    kind: Any,
    others: dict[str, Any],
    context: Any,
    size: torch.Size,
    stride: tuple[int, ...],
    parts: dict[str, Tensor],
) -> Tensor:
    wrapper: Tensor = kind.__tensor_unflatten__({**parts, **others}, context, size, stride)
    return wrapper
