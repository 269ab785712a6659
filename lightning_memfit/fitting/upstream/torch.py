"""Non-public parts of torch that fitting on several devices needs, written for torch 2.11 to 2.13.

FSDP2 lets others do its collectives (`set_custom_all_gather`, `set_custom_reduce_scatter`), and forgets a pass that was
broken off (`reset_iter_state`, from torch 2.13 on; before, that is done here). What it used for collectives, over
which ranks they go, and the gradients that a broken pass leaves, it tells nobody: these are looked up here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_memfit.memory.collectives import parameter_groups
from lightning_memfit.memory.kind import synchronize


@dataclass(frozen=True)
class ShardedUnit:
    """A module whose parameters FSDP2 gathers and whose gradients it reduces, each at once.

    Attributes:
        module: The module.
        all_gather: What does its all-gathers.
        reduce_scatter: What does its reduce-scatters.
        num_shards: Ranks among which its parameters are divided.
        copies: Ranks over which gradients are summed after that; None if there is one copy of the model.
        group: FSDP2's own record of its parameters.
    """

    module: Any
    all_gather: Any
    reduce_scatter: Any
    num_shards: int
    copies: ProcessGroup | None
    group: Any

    @property
    def is_gathered(self) -> bool:
        """Whether its parameters are whole at the moment."""
        return bool(self.group.is_unsharded)


def sharded_units(module: nn.Module) -> list[ShardedUnit]:
    """Return what FSDP2 has sharded in a module; nothing if it can't be told when to communicate, or to start anew."""
    sharded: list[Any] = [child for child in module.modules() if isinstance(child, FSDPModule)]
    needed = ("set_custom_all_gather", "set_custom_reduce_scatter", "reset_iter_state")
    if not all(hasattr(FSDPModule, name) for name in needed):
        return []
    found = []
    for child in sharded:
        groups = parameter_groups(child)
        if len(groups) > 1 or any(group._use_post_forward_mesh for group in groups):
            return []  # several meshes in one module, or another mesh for backward
        for group in groups:
            num_shards = group._all_gather_process_group.size()
            copies = group._all_reduce_process_group if group._is_hsdp else None
            communication = (group._all_gather_comm, group._reduce_scatter_comm)
            found.append(ShardedUnit(child, *communication, num_shards, copies, group))
    return found


def forget_pass(module: nn.Module) -> None:
    """Put FSDP2 in the state before a pass, after one that has been broken off; its gradients are lost."""
    inner: set[int] = set()
    for child in module.modules():
        if isinstance(child, FSDPModule):
            # Until the first forward there is no pass to forget, nor yet what it would be forgotten in.
            is_used = child._get_fsdp_state()._is_root is not None
            if id(child) not in inner and is_used:
                reset = getattr(child, "reset_iter_state", None) or partial(_reset_by_hand, child)
                reset()
                inner |= {id(other) for other in child.modules()}
            for group in parameter_groups(child):
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if getattr(parameter, "_unsharded_param", None) is not None:
                        parameter._unsharded_param.grad = None


def _reset_by_hand(module: Any) -> None:
    """Do what `reset_iter_state` does from torch 2.13 on; nothing is in flight once the device has no work left."""
    state = module._get_fsdp_state()
    for child in module.modules():
        if isinstance(child, FSDPModule):
            own: Any = child
            own_state = own._get_fsdp_state()
            own_state._modules_to_run_forward.clear()
            own_state._training_state = type(own_state._training_state).IDLE
            for group in parameter_groups(child):
                _reset_group(group)
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: Any) -> None:
    work = group._all_gather_result.all_gather_work if group._all_gather_result is not None else None
    if work is not None:
        work.wait()
    synchronize(group.device)
    group._all_gather_result = group._post_reduce_event = group._reshard_after_forward_event = None
    group._all_reduce_state = group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()
