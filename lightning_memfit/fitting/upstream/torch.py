"""Non-public parts of FSDP2 that fitting on several devices needs, written for torch 2.11 to 2.13.

FSDP2 forgets a pass that was broken off (`reset_iter_state`, from torch 2.13 on), but not the gradients that it leaves.
"""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_memfit.memory.collectives import parameter_groups

FORGETS_PASSES = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP2 goes on after a pass that was broken off."""


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
