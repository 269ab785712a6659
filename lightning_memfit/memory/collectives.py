"""Where code that communicates says so beforehand, and who wants to know; a broadcast of tensors of any layout.

Besides, what FSDP2 communicates at once, what every rank adds to a checkpoint, and whole weights of those that ranks
divide.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, distributed, nn
from torch.autograd import Function
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from typing_extensions import override

T = TypeVar("T")

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


def store_under(prefix: str) -> Store:
    """A part of the store in which the ranks of this run have met."""
    return PrefixStore(prefix, _get_default_store())


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
    # Ranks that divide weights have to come together to any save. Those of `ddp_spawn` and the like have ended.
    is_alone = trainer.world_size == 1 or not (distributed.is_available() and distributed.is_initialized())
    if is_alone or (is_handled and isinstance(trainer.strategy, DDPStrategy)):
        return [mine]
    found: list[Any] = [None] * trainer.world_size
    distributed.all_gather_object(found, mine)
    return found


# --- whole weights ----------------------------------------------------------------------------------------------------


@contextmanager
def gathered(parameters: Iterable[Any], modifier_rank: int | None = None) -> Iterator[list[Any]]:
    """Gather what ZeRO-3 has put away of parameters, on all ranks; such a one has the shape `(0,)` outside of this.

    Those that are whole already, by whomever, and maybe on one rank alone (`from_pretrained`), stay as they are.

    Args:
        parameters: Any tensors.
        modifier_rank: Rank whose changes all get; None if nothing is changed.

    Returns:
        Those that are gathered here.
    """
    away = [one for one in parameters if getattr(getattr(one, "ds_status", None), "name", "") == "NOT_AVAILABLE"]
    if not away:
        yield away
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(away, modifier_rank=modifier_rank):
        yield away


def is_divided(module: nn.Module) -> bool:
    """Whether ranks have parts of a module's weights, as under ZeRO-3, FSDP2 and tensor parallelism.

    Raises:
        ValueError: If they can't be made whole: FSDP (1) has flattened them, or the ranks have ended.
    """
    from torch.distributed.fsdp._common_utils import _is_fsdp_flattened

    parameters = list(module.parameters())
    if any(map(_is_fsdp_flattened, parameters)):
        raise ValueError(
            "FSDPStrategy has flattened these weights, and each rank has a part of them. Read them from the "
            "run's checkpoint, or train with `strategy=memfit_fsdp2`."
        )
    divided = any(hasattr(one, "ds_id") or hasattr(one, "device_mesh") for one in parameters)
    if divided and not distributed.is_initialized():
        raise ValueError(
            "Ranks that have ended had parts of these weights. Read them from the run's checkpoint (`memfit export`)."
        )
    return divided


@torch.no_grad()
def whole_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of a module whose weights are divided, with whole ones in host memory.

    All ranks have to come: weights are gathered one after the other. The first rank gets them, the others an empty
    dict. Weights of several names are one tensor.

    Args:
        module: Of any strategy for which `is_divided`, in a run or after it.
    """
    is_first = distributed.get_rank() == 0
    known: dict[str, Any] = {}
    seen: dict[int, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            known[name] = value
            continue
        if id(value) not in seen:
            with gathered([value]):
                one: Any = value.detach()
                if hasattr(one, "full_tensor"):  # gathered where its ranks communicate; after a run it is on the host
                    one = one.to(one.device_mesh.device_type).full_tensor()
                seen[id(value)] = one.to("cpu", copy=True) if is_first else one.new_empty(0)
        known[name] = seen[id(value)]
    return known if is_first else {}


def on_first_rank(do: Callable[[], T], together: bool) -> T | None:
    """Do something on the first rank of several alone, such as to write a folder.

    Args:
        do: What to do.
        together: Whether all ranks come here: they then wait for it, return what it returned and fail if it failed.

    Returns:
        Its result; None on other ranks that don't wait.

    Raises:
        ValueError: On all ranks, if it raised one.
        RuntimeError: On the other ranks, if it raised something else.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return do()
    if not together:
        return do() if distributed.get_rank() == 0 else None
    told: list[Any] = [None, None]
    if distributed.get_rank() == 0:
        try:
            told[0] = do()
        except Exception as error:
            distributed.broadcast_object_list([None, (isinstance(error, ValueError), str(error))], src=0)
            raise
    distributed.broadcast_object_list(told, src=0)
    if told[1] is not None:
        is_value_error, text = told[1]
        raise (ValueError if is_value_error else RuntimeError)(text)
    result: T = told[0]
    return result


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
