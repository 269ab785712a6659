"""Non-public parts of torch that fitting on several devices needs, written for torch 2.11 to 2.13.

FSDP2 lets others do its collectives (`set_custom_all_gather`, `set_custom_reduce_scatter`), and forgets a pass that was
broken off (`reset_iter_state`, from torch 2.13 on). What it used for collectives, over which ranks they go, and the
gradients that a broken pass leaves, it tells nobody: these are looked up here.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_memfit.memory.collectives import parameter_groups

FORGETS_PASSES = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP2 goes on after a pass that was broken off."""


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
    if not FORGETS_PASSES:
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
                child.reset_iter_state()
                inner |= {id(other) for other in child.modules()}
            for group in parameter_groups(child):
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if getattr(parameter, "_unsharded_param", None) is not None:
                        parameter._unsharded_param.grad = None
