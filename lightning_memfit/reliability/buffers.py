"""`BufferCopies`: buffers as they were before a step, to put them back if the step is left out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_LARGE_BYTES = 1 << 20


class BufferCopies:
    """Copies of a module's buffers, on their own devices.

    Buffers over 1 MiB (tables, codes of quantized weights, queues) are not copied, nor those of a module that has its
    first one after two steps.

    Args:
        module: The module in training.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners: dict[str, dict[str, Tensor | None]] = {}
        self._copies: dict[str, Tensor] = {}
        self._never_finite: set[str] = set()
        self._walks_left = 2

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers as they are now."""
        if self._walks_left:
            self._walks_left -= 1
            for path, child in self._module.named_modules():
                for key, buffer in child._buffers.items():
                    self._find(f"{path}.{key}".lstrip("."), child._buffers, buffer)
        for name, owner in self._owners.items():
            buffer, before = owner.get(name.rpartition(".")[2]), self._copies.get(name)
            if buffer is None:
                self._copies.pop(name, None)
            elif before is None or (before.shape, before.dtype) != (buffer.shape, buffer.dtype):
                self._copies[name] = buffer.detach().clone()
            else:
                before.copy_(buffer)

    def _find(self, name: str, owner: dict[str, Tensor | None], buffer: Tensor | None) -> None:
        if buffer is None or is_lazy(buffer):
            return
        if buffer.nbytes <= _LARGE_BYTES:
            self._owners[name] = owner
        elif not _is_finite(buffer):  # masks
            self._never_finite.add(name)

    @torch.no_grad()
    def put_back(self) -> tuple[bool, list[str]]:
        """Put all copied buffers back if one of them holds NaN or infinite values now where it held none before.

        Returns:
            Whether it was so, and names of buffers that are not finite now and of which there is no copy.
        """
        now = {name: buffer for name, buffer in self._module.named_buffers() if not is_lazy(buffer)}
        uncopied = [name for name in now if name not in self._copies and name not in self._never_finite]
        lost = [name for name in uncopied if not _is_finite(now[name])]
        is_broken = any(name in now and _is_newly_broken(now[name], copy) for name, copy in self._copies.items())
        for name, copy in self._copies.items() if is_broken else ():
            buffer = now.get(name)
            if buffer is None or buffer.is_inference() or (buffer.shape, buffer.dtype) != (copy.shape, copy.dtype):
                self._owners[name][name.rpartition(".")[2]] = copy.clone()
            else:
                buffer.copy_(copy)
        return is_broken, lost


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a dense one."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.coalesce().values() if local.is_sparse else local


def _is_finite(tensor: Tensor) -> bool:
    has_values = (tensor.is_floating_point() or tensor.is_complex()) and tensor.device.type != "meta"
    return not has_values or bool(_local(tensor).isfinite().all())


def _is_newly_broken(now: Tensor, before: Tensor) -> bool:
    """Whether values are not finite that were; some buffers hold infinite ones from the start (masks, minima)."""
    if _is_finite(now):
        return False
    finite, was = _local(now).isfinite(), _local(before).isfinite()
    return finite.shape != was.shape or bool((~finite & was.to(finite.device)).any())
