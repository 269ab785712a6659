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
    into a buffer that is allocated beforehand, so that reducing needs no new memory.

    Args:
        module: The module in training, whose parameters are in the same order on every rank. Which of them are trained
            may change from step to step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.prepare()

    def prepare(self) -> None:
        """Look which parameters are trained now, and make room for their gradients: before ranks agree to reduce."""
        self._parameters = list(self._module.parameters())
        self._is_trained = [parameter.requires_grad for parameter in self._parameters]
        lengths: dict[tuple[torch.device, torch.dtype], int] = {}
        for parameter, is_trained in zip(self._parameters, self._is_trained, strict=True):
            if is_trained and _is_small(parameter):
                key = (parameter.device, parameter.dtype)
                length = lengths.get(key, 0)
                if length * parameter.element_size() < _BUFFER_BYTES:
                    lengths[key] = length + parameter.numel()
        for (device, dtype), length in lengths.items():
            buffer = self._buffers.get((device, dtype))
            if buffer is None or buffer.numel() < length:
                self._buffers.pop((device, dtype), None)  # before the larger one is made
                self._buffers[device, dtype] = torch.empty(length, device=device, dtype=dtype)

    def present(self) -> list[bool]:
        """Which of the module's parameters have a gradient of the steps since `prepare` was last called.

        A frozen one may have kept the gradient of an earlier step, which is summed already.
        """
        pairs = zip(self._parameters, self._is_trained, strict=True)
        return [is_trained and parameter.grad is not None for parameter, is_trained in pairs]

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
            self._add_up_packed(self._buffers[key], grads)
        for work in waiting:
            work.wait()

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
