"""`HostCopy`: the values of a tensor in host memory, without the copy counting as memory of the device.

`_disable_current_modes` is private torch API (since 2.0). A simulated device is a dispatch mode, and copies in host
memory must not count as memory of that device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.oom import is_out_of_memory

_SMALL_BYTES = 1 << 16


class HostCopy:
    """The values of one tensor, kept in host memory.

    Args:
        tensor: Any tensor; a sparse one or a subclass keeps its kind. For a wrapper, such as a quantized
            optimizer state, the tensors inside are copied, because few wrappers can be cloned.
        small_may_stay: Whether the copy of a tensor below 64 KiB may stay on a device with its own memory if there is
            room: then it waits for nothing.
    """

    def __init__(self, tensor: Tensor, small_may_stay: bool = False) -> None:
        self._parts: dict[str, HostCopy] = {}
        self._wrap: Callable[[dict[str, Tensor]], Tensor] | None = None
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}  # a DTensor names its mesh as well
            self._parts = {
                name: HostCopy(part, small_may_stay) for name, part in parts.items() if isinstance(part, Tensor)
            }
            others = {name: part for name, part in parts.items() if name not in self._parts}
            self._wrap = partial(_wrapped, type(tensor), others, context, tensor.size(), tensor.stride())
            return
        with _disable_current_modes(), torch.no_grad():
            self._values = _copied(tensor.detach(), small_may_stay)

    def equals(self, tensor: Tensor) -> bool:
        """Whether a tensor in host memory holds the values; False for every other, which would have to be copied."""
        if self._parts or self._wrap is not None or tensor.device.type != "cpu" or not self._values.is_cpu:
            return False
        with _disable_current_modes():
            values = tensor.detach()
            return self._values.layout == values.layout == torch.strided and torch.equal(self._values, values)

    def is_in(self, tensor: Tensor) -> bool:
        """Whether a tensor on any device holds the values; that takes as much memory there as it has."""
        with _disable_current_modes(), torch.no_grad():
            held, values = tensor.detach(), self.moved_to(tensor.device)
            return bool(((held == values) | ((held != held) & (values != values))).all())

    def restore(self, tensor: Tensor) -> None:
        """Write the values back in place."""
        for name, part in self._parts.items():
            part.restore(getattr(tensor, name))
        if not self._parts:
            with _disable_current_modes(), torch.no_grad():
                tensor.detach().copy_(self._values)

    def moved_to(self, device: torch.device) -> Tensor:
        """Return a new tensor with the values on a device."""
        if self._wrap is not None:
            return self._wrap({name: part.moved_to(device) for name, part in self._parts.items()})
        moved = self._values.to(device)
        return moved.clone() if moved is self._values else moved


def _copied(tensor: Tensor, small_may_stay: bool) -> Tensor:
    kind = DeviceKind.of(tensor.device)
    if kind.is_host:
        return tensor.clone()
    if small_may_stay and kind.has_own_memory and tensor.layout is torch.strided and tensor.nbytes < _SMALL_BYTES:
        try:
            return tensor.clone()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
    return tensor.cpu()


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
