"""Where code that communicates says so beforehand, and who wants to know; a broadcast of tensors of any layout.

Besides, what FSDP2 communicates at once, and what every rank adds to a checkpoint.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, distributed
from torch.autograd import Function
from typing_extensions import override

_listeners: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> Callable[[], None]:
    """Call a function before every collective that is announced in this process.

    Args:
        listener: The function. What it raises keeps the collective from being done.

    Returns:
        A function that ends this.
    """
    _listeners.append(listener)

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


def announce() -> None:
    """Say that a collective of this module's own follows, with nothing in between that may fail."""
    for listener in _listeners:
        listener()


def announce_in_backward(tensor: Tensor) -> Tensor:
    """Return the same tensor, whose backward says that a collective follows."""
    announced: Tensor = _Announcing.apply(tensor)  # type: ignore[no-untyped-call]
    return announced


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], device: torch.device | None = None) -> None:
    """Give all ranks the first one's values, in place.

    Tensors that aren't contiguous go by way of a copy: NCCL refuses them, and gloo sends as many elements as they have
    from their first one on, whosever these are. Of elements that `expand` repeats, one is sent.

    Args:
        tensors: The same number on every rank, of the same shapes and types, in the same order.
        device: Where the ranks communicate; None is where each tensor lies.
    """
    for tensor in tensors:
        place = tensor.detach()
        for dim, step in enumerate(place.stride()):
            if step == 0 and place.shape[dim] > 1:
                place = place.narrow(dim, 0, 1)
        value = place.to(device or place.device).contiguous()
        distributed.broadcast(value, src=0)
        if value is not place:
            place.copy_(value)


def parameter_groups(module: Any) -> list[Any]:
    """FSDP2's records of the parameters that it gathers at once for one of its modules: one, several, or none."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def of_every_rank(trainer: Trainer, mine: Any) -> list[Any]:
    """Return what every rank adds to a checkpoint, in the order of ranks; while an error is handled, this rank's alone.

    An error may be this rank's alone. The others don't come then, and nothing would be saved. Once a run has ended in
    one, and where each rank has a part of the weights, ranks save together or not at all.

    Args:
        trainer: The Trainer that saves, on all ranks together unless it was interrupted.
        mine: What this rank adds; anything that can be pickled.
    """
    is_handled = (
        trainer.state.status == TrainerStatus.INTERRUPTED and trainer.state.stage is not None
    )  # else it is over
    # Ranks that divide weights have to come together to any save.
    if trainer.world_size == 1 or (is_handled and isinstance(trainer.strategy, DDPStrategy)):
        return [mine]
    found: list[Any] = [None] * trainer.world_size
    distributed.all_gather_object(found, mine)
    return found


class _Announcing(Function):
    @override
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @override
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        announce()
        return grads[0]
