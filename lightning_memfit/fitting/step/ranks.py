"""What the ranks of a run tell each other while fitting micro-batches."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn


class Agreement:
    """Exchange a few numbers between all ranks, on the CPU and apart from the training's own communication.

    One rank alone needs no group, and an exchange costs it nothing. With several, an exchange is one all-gather over a
    gloo group of its own: it neither waits for the accelerator nor mixes with collectives under way there.

    Args:
        world_size: Number of ranks. With more than one, all of them must construct this together.
        timeout: How long an exchange waits for the slowest rank before it raises.
    """

    def __init__(self, world_size: int, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.world_size = world_size
        self._group = distributed.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None

    def exchange(self, *numbers: float) -> list[Sequence[float]]:
        """Tell all ranks some numbers and hear theirs, in the order of ranks.

        Args:
            numbers: As many on every rank. Integers up to 2^53 stay exact.
        """
        if self._group is None:
            return [numbers]
        mine = torch.tensor(numbers, dtype=torch.float64)
        theirs = [torch.empty_like(mine) for _ in range(self.world_size)]
        distributed.all_gather(theirs, mine, group=self._group)
        return [one.tolist() for one in theirs]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Element by element, whether the flag is set on any rank."""
        if self._group is None:
            return list(flags)
        tensor: Tensor = torch.tensor(flags, dtype=torch.uint8)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in tensor.tolist()]

    def close(self) -> None:
        """Give the group up."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None


# Adding up the gradients of all ranks, once per effective batch and only when every rank has its own.


_PACKED_BELOW_BYTES = 1 << 20
_BUFFER_BYTES = 25 << 20  # the bucket size of DistributedDataParallel


class GradientReducer:
    """Sum gradients over ranks in place.

    DistributedDataParallel reduces while it runs backward: a rank that fails there leaves the others waiting in a
    collective. Here nothing is reduced until all ranks have said that their gradients are complete, at the price of not
    overlapping the reduction with the last backward. Large gradients are reduced where they are; small ones travel
    together in a buffer that is allocated once, so that reducing needs no new memory.

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
    # The memory in its own order, which is the same on all ranks; a channels-last gradient has no flat `view`.
    return grad.view(-1) if grad.is_contiguous() else grad.as_strided((grad.numel(),), (1,))


def broadcast_buffers(module: nn.Module) -> None:
    """Give all ranks rank 0's buffers, as DistributedDataParallel does before a forward that synchronises."""
    for buffer in module.buffers():
        distributed.broadcast(buffer, src=0)
