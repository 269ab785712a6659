"""`GatheredWeights`: what is done to weights while FSDP2 has gathered them reaches the parts that are trained.

FSDP2 computes with other parameters than those that it shards and an optimizer steps: copies of all parts, which it
drops when the weights are put away. Non-public parts of torch are needed for that, written for torch 2.11 to 2.13.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_memfit.memory.collectives import parameter_groups
from lightning_memfit.memory.wrapping import wrap_method


class GatheredWeights:
    """Gathers weights that no block holds whenever a step or a hook computes with them, and takes over what it writes.

    They stay gathered from the begin of a step to its backward. Their values and `requires_grad` are taken over when
    they are put away, each rank's part from its own copy. Blocks gather their own weights, within their forward.

    Args:
        module: The module that FSDP2 shards as a whole.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._root: Any = module
        self._divided: dict[int, int] = {}
        self._units: list[Any] = [one for one in module.modules() if isinstance(one, FSDPModule)]  # type: ignore[attr-defined]
        self._undo: list[Callable[[], None]] = []
        # Of what a hook calls, a block would else be the root, and torch refuses the step.
        self._root._get_fsdp_state()._lazy_init()
        for group in parameter_groups(module):
            self._undo.append(wrap_method(group, "_to_unsharded", partial(self._note, group)))
            self._undo.append(wrap_method(group, "_to_sharded", partial(self._take_over, group)))
        for child in module.children():  # type: ignore[attr-defined]
            if not isinstance(child, FSDPModule):
                # No method of this object: a copy of the child would have one of a copy of the whole module.
                self._undo.append(child.register_forward_pre_hook(lambda *_: self._gather_for_child()).remove)
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            self._undo.append(wrap_method(module, name, self._renewing))

    def detach(self) -> None:
        """Look no more."""
        while self._undo:
            self._undo.pop()()

    @property
    def are_gathered(self) -> bool:
        """Whether the weights of no block are gathered at the moment."""
        return any(group.is_unsharded for group in parameter_groups(self._root))

    def put_away(self) -> None:
        """Take over what was written into gathered weights, and leave each rank its parts.

        `reshard_after_forward=False` and evaluation leave those of blocks gathered, too.
        """
        for unit in self._units:
            unit.reshard()

    def _gather_for_child(self) -> None:
        """Gather them before a child's forward that no step of the module contains, or that follows a backward pass."""
        if torch.compiler.is_compiling():
            return
        for group in parameter_groups(self._root):  # torch lets its streams wait once, when a step begins
            written = group.device_handle.Event()
            written.record()
            group._wait_all_gather_streams_on_event(written)
        if self._root._get_fsdp_state()._training_state.name == "IDLE" and not self.are_gathered:
            self._root.unshard()

    def _renewing(self, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what sets `requires_grad` of parts; weights that are gathered are gathered anew."""
        were_gathered = self.are_gathered
        self.put_away()
        result = change(*args, **kwargs)
        if were_gathered:
            self._root.unshard()
        return result

    def _note(self, group: Any, gather: Callable[[], None]) -> None:
        gather()
        self._divided |= {id(one): _version(one.sharded_param) for one in group.fsdp_params}

    @torch.no_grad()
    def _take_over(self, group: Any, put_away: Callable[[], None]) -> None:
        for weight in group.fsdp_params if group.is_unsharded else ():
            part, gathered = weight.sharded_param._local_tensor, weight._unsharded_param
            if hasattr(part, "fsdp_pre_all_gather"):  # gathered in a form of its own
                continue
            mesh, values = weight.mesh_info, _local(gathered).detach()
            own = values.chunk(getattr(mesh, "shard_mesh_size", 1), weight.fsdp_placement.dim)
            rank = getattr(mesh, "shard_mesh_rank", 0)
            if _version(weight.sharded_param) == self._divided.get(id(weight)):  # else it was stepped: that counts
                if weight.sharded_param.requires_grad != gathered.requires_grad:
                    weight.sharded_param.requires_grad_(gathered.requires_grad)
                if rank < len(own) and own[rank].numel():
                    value = own[rank]
                    if value.dtype != part.dtype:  # what has not changed keeps its precision
                        value = torch.where(value == part.to(value.dtype), part, value.to(part.dtype))
                    part.copy_(value)
            if values.data_ptr() != weight.all_gather_outputs[0].data_ptr():  # `weight.data = ...`
                gathered.data = weight.all_gather_outputs[0].as_strided(
                    weight._orig_size, weight._contiguous_orig_stride
                )
        put_away()


def _local(tensor: Any) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _version(tensor: Any) -> int:
    """The number of writes; of a tensor that is divided, an operation counts for it or for this rank's part."""
    own = 0 if tensor.is_inference() else tensor._version
    return own + _version(tensor._local_tensor) if isinstance(tensor, DTensor) else own
