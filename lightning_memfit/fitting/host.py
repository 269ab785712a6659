"""Copies of tensors in host memory, out of sight of the device's accounting.

`_disable_current_modes` is private torch API (there since 2.0): a simulated device is a dispatch mode, and what is
copied to "the host" must not count there.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class HostCopy:
    """The values of one tensor, kept in host memory.

    Args:
        tensor: Any tensor; a sparse one or a subclass keeps its kind.
    """

    def __init__(self, tensor: Tensor) -> None:
        with _disable_current_modes(), torch.no_grad():
            self._values = tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()

    def restore(self, tensor: Tensor) -> None:
        """Write the values back, in place."""
        with _disable_current_modes(), torch.no_grad():
            tensor.detach().copy_(self._values)

    def moved_to(self, device: torch.device) -> Tensor:
        """A new tensor with the values, on a device."""
        return self._values.clone() if device.type == "cpu" else self._values.to(device)
