"""`GradientReducer`: sums gradients over ranks once per effective batch, after every rank has completed its own."""

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn

_PACKED_BELOW_BYTES = 1 << 20
_BUFFER_BYTES = 25 << 20  # the bucket size of DistributedDataParallel


class GradientReducer:
    """Sums gradients over ranks in place.

    DistributedDataParallel reduces while it runs backward: a rank that fails there leaves the others waiting in a
    collective. Here nothing is reduced until all ranks have reported complete gradients, at the price of not
    overlapping the reduction with the last backward. Large gradients are reduced in place; small ones are packed
    into a buffer that is allocated once, so that reducing needs no new memory.

    Args:
        parameters: The trainable parameters, in the same order on every rank.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for parameter in self.parameters:
            self._reserve(parameter)

    def present(self) -> list[bool]:
        """Which parameters have a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]

    def add_up(self, present: list[bool]) -> None:
        """Sum the gradients of the parameters that have one on any rank; absent ones count as zero."""
        packed: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        waiting = []
        for parameter, is_present in zip(self.parameters, present, strict=True):
            if not is_present:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            if grad.is_sparse:
                waiting.append(distributed.all_reduce(grad, async_op=True))
            elif _is_small(grad):
                packed.setdefault((grad.device, grad.dtype), []).append(_flat(grad))
            else:
                waiting.append(distributed.all_reduce(_flat(grad), async_op=True))
        for key, grads in packed.items():
            self._add_up_packed(self._buffers[key], grads)
        for work in waiting:
            work.wait()

    def _reserve(self, parameter: Tensor) -> None:
        if not _is_small(parameter):
            return
        key = (parameter.device, parameter.dtype)
        buffer = self._buffers.get(key)
        length = parameter.numel() + (0 if buffer is None else buffer.numel())
        if buffer is None or buffer.nbytes < _BUFFER_BYTES:
            self._buffers[key] = torch.empty(length, device=parameter.device, dtype=parameter.dtype)

    @staticmethod
    def _add_up_packed(buffer: Tensor, grads: list[Tensor]) -> None:
        rest = grads
        while rest:
            taken, length = 0, 0
            while taken < len(rest) and length + rest[taken].numel() <= buffer.numel():
                buffer[length : length + rest[taken].numel()].copy_(rest[taken])
                length += rest[taken].numel()
                taken += 1
            distributed.all_reduce(buffer[:length])
            offset = 0
            for grad in rest[:taken]:
                grad.copy_(buffer[offset : offset + grad.numel()])
                offset += grad.numel()
            rest = rest[taken:]


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < _PACKED_BELOW_BYTES


def _flat(grad: Tensor) -> Tensor:
    # The elements in memory order, which is the same on all ranks; a channels-last gradient has no flat `view`.
    return grad.view(-1) if grad.is_contiguous() else grad.as_strided((grad.numel(),), (1,))
