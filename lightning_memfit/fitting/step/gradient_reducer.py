"""`GradientReducer`: sums gradients over ranks once per effective batch, after every rank has completed its own."""

import torch
from torch import Tensor, distributed, nn

_PACKED_BELOW_BYTES = 1 << 20
_BUFFER_BYTES = 25 << 20  # the bucket size of DistributedDataParallel


class GradientReducer:
    """Sums gradients over ranks in place.

    DistributedDataParallel reduces while it runs backward: a rank that fails there leaves the others waiting in a
    collective. Here nothing is reduced until all ranks have reported complete gradients, at the price of not
    overlapping the reduction with the last backward. Large gradients are reduced in place; small ones are packed
    into a buffer that is allocated after backward, when activations are gone, and before ranks agree, so that reducing
    needs no new memory, unless other ranks have gradients that this one lacks.

    Args:
        module: The module in training, whose parameters are in the same order on every rank. Which of them are trained
            may change from batch to batch, and differ among ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._parameters: list[nn.Parameter] = []

    def prepare(self, is_first: bool, is_last: bool = True) -> None:
        """Look what a batch has trained, and make room for the gradients: before ranks agree to reduce."""
        self._parameters = list(self._module.parameters())
        if is_first:
            self._trained: dict[int, nn.Parameter] = {}
        self._trained.update((id(parameter), parameter) for parameter in self._parameters if parameter.requires_grad)
        lengths: dict[tuple[torch.device, torch.dtype], int] = {}
        for parameter in self._parameters if is_last else ():
            if id(parameter) in self._trained and _is_small(parameter):
                key = (parameter.device, parameter.dtype)
                lengths[key] = lengths.get(key, 0) + parameter.numel()
        for (device, dtype), length in lengths.items():
            self._buffer(device, dtype, length)

    def free(self) -> None:
        """Free the buffer until gradients are reduced again."""
        self._buffers.clear()

    def _buffer(self, device: torch.device, dtype: torch.dtype, length: int) -> Tensor:
        """Return a buffer for so many elements, at most `_BUFFER_BYTES`: its size is the same on all ranks."""
        length = min(length, _BUFFER_BYTES // dtype.itemsize)
        buffer = self._buffers.get((device, dtype))
        if buffer is None or buffer.numel() < length:
            self._buffers.pop((device, dtype), None)  # before the larger one is made
            buffer = self._buffers[device, dtype] = torch.empty(length, device=device, dtype=dtype)
        return buffer[:length]

    def present(self) -> list[bool]:
        """Which of the module's parameters have a gradient of this window.

        One that was frozen all the time may have kept the gradient of an earlier step, which is summed already.
        """
        return [id(parameter) in self._trained and parameter.grad is not None for parameter in self._parameters]

    def add_up(self, present: list[bool]) -> None:
        """Sum the gradients of the parameters that have one on any rank; absent ones count as zero."""
        packed: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        waiting = []
        for parameter, is_present, is_own in zip(self._parameters, present, self.present(), strict=True):
            if not is_present:
                continue
            if parameter.grad is None or not is_own:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            if grad.is_sparse:
                waiting.append(distributed.all_reduce(grad, async_op=True))
            elif _is_small(grad):
                packed.setdefault((grad.device, grad.dtype), []).append(_flat(grad))
            else:
                waiting.append(distributed.all_reduce(_flat(grad), async_op=True))
        for key, grads in packed.items():
            self._add_up_packed(self._buffer(*key, sum(grad.numel() for grad in grads)), grads)
        for work in waiting:
            work.wait()
        self.free()

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
