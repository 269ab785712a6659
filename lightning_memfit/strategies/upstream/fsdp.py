"""`GatheredWeights`: what is done to weights while FSDP2 has gathered them reaches the parts that are trained.

FSDP2 computes with other parameters than those that it shards and an optimizer steps: copies of all parts, which it
drops when the weights are put away. Non-public parts of torch are needed for that, written for torch 2.11 to 2.13.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_memfit.memory.collectives import parameter_groups
from lightning_memfit.memory.wrapping import wrap_method


@dataclass
class _AsGathered:
    """What a weight was like when it was gathered.

    Attributes:
        version: Of the gathered one, which counts writes.
        divided_version: Of this rank's part, which an optimizer steps.
        requires_grad: Of both.
    """

    version: int
    divided_version: int
    requires_grad: bool


class GatheredWeights:
    """Takes over what is written into gathered weights into each rank's part, before they are put away.

    Values and `requires_grad` are taken over, each rank's part from its own copy. Writes past torch's version counters
    (`weight.data.clamp_()`) are seen in the weights that stay gathered for the whole of a step, those of no block.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._root: Any = module
        self._noted: dict[int, list[_AsGathered]] = {}
        self._awaited: dict[int, int] = {}
        self._undo: list[Callable[[], None]] = []
        self._units: list[Any] = [one for one in module.modules() if isinstance(one, FSDPModule)]  # type: ignore[attr-defined]
        # Of what a hook calls, a block would else be the root, and torch refuses the step.
        self._root._get_fsdp_state()._lazy_init()
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            self._undo.append(wrap_method(module, name, self._switch))
        for unit in self._units:
            for group in parameter_groups(unit):
                take_over = partial(self._take_over, group, unit is module)
                self._undo.append(wrap_method(group, "unshard", partial(self._renew, group)))
                self._undo.append(wrap_method(group, "_to_unsharded", partial(self._note, group)))
                self._undo.append(wrap_method(group, "_to_sharded", take_over))
                self._undo.append(wrap_method(group, "_to_sharded_post_forward", take_over))
        for child in module.children():  # type: ignore[attr-defined]
            if not isinstance(child, FSDPModule):
                # No method of this object: a copy of the child would have one of a copy of the whole module.
                holds_units = any(isinstance(one, FSDPModule) for one in child.modules())
                handle = child.register_forward_pre_hook(lambda *_, waits=holds_units: self._gather_for_child(waits))
                self._undo.append(handle.remove)

    @property
    def _all_groups(self) -> list[Any]:
        return [group for unit in self._units for group in parameter_groups(unit)]

    def detach(self) -> None:
        """Look no more."""
        while self._undo:
            self._undo.pop()()

    @property
    def are_gathered(self) -> bool:
        """Whether the weights of no block are gathered at the moment."""
        return any(group.is_unsharded for group in parameter_groups(self._root))

    def _gather_for_child(self, waits: bool) -> None:
        """Gather them before a child's forward that no step of the module contains, such as one in a hook.

        In a step, what was written into parts before counts for this child: torch's version counters don't show
        `weight.data.copy_(...)`.
        """
        if torch.compiler.is_compiling():
            return
        if self._is_idle():
            self._root.unshard()
        elif waits:
            self._await_writes()

    def _is_idle(self) -> bool:
        state = self._root._get_fsdp_state()
        return state._training_state.name == "IDLE" and not self.are_gathered

    def put_away(self) -> None:
        """Take over what was written into gathered weights, and leave each rank its parts.

        `reshard_after_forward=False` and evaluation leave those of blocks gathered, too.
        """
        for unit in self._units:
            unit.reshard()

    def _switch(self, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what sets `requires_grad` of parts; the gathered weights have it at once."""
        gathered = [group for group in parameter_groups(self._root) if group.is_unsharded]
        for group in gathered:
            for weight, noted in zip(group.fsdp_params, self._noted[id(group)], strict=True):
                _take_flag(weight, noted)
        result = change(*args, **kwargs)
        for group in gathered:
            for weight, noted in zip(group.fsdp_params, self._noted[id(group)], strict=True):
                noted.requires_grad = weight.sharded_param.requires_grad
                if weight._unsharded_param.requires_grad != noted.requires_grad:
                    weight._unsharded_param.requires_grad_(noted.requires_grad)
        return result

    def _renew(self, group: Any, gather: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Gather the parts of now: again if they were changed while gathered, and after what has written them.

        torch lets its streams wait for the optimizer when a step begins, but not for what is written within the step.
        """
        noted = self._noted.get(id(group), []) if group.is_unsharded else []
        if any(
            _version(one.sharded_param) != was.divided_version
            for one, was in zip(group.fsdp_params, noted, strict=False)
        ):
            group._to_sharded()
        if not group.is_unsharded and any(
            _version(one.sharded_param) != self._awaited.get(id(one)) for one in group.fsdp_params
        ):
            self._await_writes()  # once for all: one event for each group would keep it from being gathered ahead
            written = (one for each in self._all_groups for one in each.fsdp_params)
            self._awaited = {id(one): _version(one.sharded_param) for one in written}
        gather(*args, **kwargs)

    def _await_writes(self) -> None:
        """Let torch's streams wait for what the device has been told so far."""
        for group in self._all_groups[:1]:  # all have the same streams
            _let_gathering_wait(group)

    def _note(self, group: Any, gather: Callable[[], None]) -> None:
        if group.is_unsharded:
            return
        gather()
        self._noted[id(group)] = [
            _AsGathered(_version(one._unsharded_param), _version(one.sharded_param), one.sharded_param.requires_grad)
            for one in group.fsdp_params
        ]

    def _take_over(self, group: Any, stays: bool, put_away: Callable[[], None]) -> None:
        noted = self._noted.pop(id(group), None) if group.is_unsharded else None
        if noted is not None:
            copies = [pair for one in zip(group.fsdp_params, noted, strict=True) for pair in _written(*one, stays)]
            if copies:
                _copy(copies)
                _let_gathering_wait(group)
        put_away()


def _let_gathering_wait(group: Any) -> None:
    written = group.device_handle.Event()
    written.record()
    group._wait_all_gather_streams_on_event(written)


def _local(tensor: Any) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _version(tensor: Any) -> int:
    """The number of writes; of a tensor that is divided, an operation counts for it or for this rank's part."""
    own = 0 if tensor.is_inference() else tensor._version
    return own + _version(tensor._local_tensor) if isinstance(tensor, DTensor) else own


def _take_flag(weight: Any, noted: _AsGathered) -> None:
    requires_grad = weight._unsharded_param.requires_grad
    if requires_grad != noted.requires_grad:
        weight.sharded_param.requires_grad_(requires_grad)
        noted.requires_grad = requires_grad


def _written(weight: Any, noted: _AsGathered, stays: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of a weight that was written, or may have been: where it is trained, and as it is gathered."""
    gathered, part = weight._unsharded_param, _local(weight.sharded_param)
    if hasattr(part, "fsdp_pre_all_gather"):  # gathered in a form of its own
        return
    _take_flag(weight, noted)
    is_moved = _local(gathered).data_ptr() != weight.all_gather_outputs[0].data_ptr()  # `weight.data = ...`
    is_written = is_moved or _version(gathered) != noted.version
    if _version(weight.sharded_param) != noted.divided_version:  # an optimizer's step counts
        return
    if not is_written and not stays:
        return
    mesh, dim = weight.mesh_info, weight.fsdp_placement.dim
    parts = _local(gathered).detach().chunk(getattr(mesh, "shard_mesh_size", 1), dim)
    rank = getattr(mesh, "shard_mesh_rank", 0)
    if rank < len(parts) and parts[rank].numel():
        yield part.detach(), parts[rank]
    if is_moved:  # back to where torch gathers it, as the same leaf of autograd's graph
        gathered.data = weight.all_gather_outputs[0].as_strided(weight._orig_size, weight._contiguous_orig_stride)


_autograd: Any = torch.autograd
_without_count = _autograd._unsafe_preserve_version_counter


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy gathered parts; where they are of another type, what has not changed keeps its precision."""
    parts, values = [part for part, _ in pairs], []
    for part, value in pairs:
        is_exact = value.dtype == part.dtype
        values.append(value if is_exact else torch.where(value != part.to(value.dtype), value.to(part.dtype), part))
    counted = tuple(part for part in parts if not part.is_inference())
    with _without_count(counted):
        torch._foreach_copy_(parts, values)
