"""Non-public parts of torch that FSDP2 and tensor parallelism need, written for torch 2.11 to 2.13.

FSDP2 gathers weights for a module's forward, and a step calls what it likes: `StepsAsForward`.

A module's own parameters are replaced while it runs, and fused weights, `q|k|v`, are divided so that a rank has its
part of each. torch has no public placement for that: `_StridedShard`, written for FSDP2 over tensor parallelism,
describes it, and no other module names it. A distributed checkpoint stores one rectangle per rank, which such a part is
not. There the same tensor is therefore divided plainly, so that checkpoints don't depend on the division.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.hooks import RemovableHandle


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters by name, to be read and replaced; a replacement need not be an `nn.Parameter`."""
    return module._parameters


def distribute_packed(tensor: Tensor, mesh: DeviceMesh, dim: int, parts: int) -> DTensor:
    """Divide each of `parts` equal parts of a dimension among the ranks of a mesh, with the first rank's values.

    Raises:
        ValueError: If this torch takes the placement for a part of FSDP2's, as 2.11 does.
    """
    whole = distribute_tensor(tensor, mesh, [Replicate()])
    try:
        packed: DTensor = whole.redistribute(placements=[_StridedShard(dim, split_factor=parts)])
    except ValueError as error:
        raise ValueError(
            f"torch {torch.__version__} can't divide fused projections such as `q|k|v` among ranks. Take torch 2.13, "
            "or a model whose projections are separate (Llama, Qwen)."
        ) from error
    return packed


def packed_slice(tensor: Tensor, dim: int, parts: int, mesh: DeviceMesh) -> Tensor:
    """The part that this rank has of a tensor divided this way."""
    part: Tensor = tensor.unflatten(dim, (parts, mesh.size(), -1)).select(dim + 1, mesh.get_local_rank())
    return part.flatten(dim, dim + 1)


def is_packed(tensor: Any) -> TypeGuard[DTensor]:
    """Whether tensor parallelism, the last dimension of the mesh, divides a tensor this way."""
    return isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], _StridedShard)


class StepsAsForward:
    """Runs steps as forward passes of a sharded module, which begin with the first layer that a step calls.

    What no block holds is gathered then. Before, and once an optimizer has stepped within the step, weights are this
    rank's parts, and what is written into them counts. torch's `register_fsdp_forward_method` would gather before the
    step, which would lose what it writes first, such as a momentum encoder.
    """

    def __init__(self, module: Any) -> None:
        self._root = module
        self._units = [one for one in self._root.modules() if isinstance(one, FSDPModule)]
        self._state = self._root._get_fsdp_state()
        self._state._lazy_init()  # of what a hook calls, a block would else be the root, and torch refuses the step
        self._is_in_step = False
        self._handles: list[RemovableHandle] = []
        for child in self._root.children():
            self._watch(child, True)

    def _watch(self, layer: Any, is_outer: bool) -> None:
        """Gather before any layer outside of blocks, and before blocks; what is compiled gathers once for all of it."""
        is_unit = isinstance(layer, FSDPModule)

        # No method of this object: a copy of the layer would have one of a copy of the whole module.
        def before(*_: Any) -> None:
            if self._state._training_state.name == "IDLE" and (is_outer or not torch.compiler.is_compiling()):
                self._gather(is_unit)

        self._handles.append(layer.register_forward_pre_hook(before, prepend=True))
        for child in () if is_unit else layer.children():
            self._watch(child, isinstance(child, FSDPModule))

    def _gather(self, is_unit: bool) -> None:
        if self._is_in_step:
            self._state._pre_forward(self._root, (), {})
        elif not is_unit:  # in a hook; blocks gather their own
            self._root.unshard()

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, whose loss, or whatever it returns, begins the backward pass."""
        before, self._is_in_step = self._is_in_step, True
        try:
            output = step(*args, **kwargs)
            return self._state._post_forward(self._root, (), output) if self._is_open else output
        finally:
            self._is_in_step = before

    @property
    def _is_open(self) -> bool:
        return self._is_in_step and self._state._training_state.name == "FORWARD"

    def announce_backward(self, loss: Tensor) -> None:
        """Begin a backward pass within a step, as in manual optimization.

        FSDP2 reduces gradients at the end of a pass that has come through what a forward returned.
        """
        if self._is_open:
            self._state._post_forward(self._root, (), loss)
        else:
            self._state._register_pre_backward_hook(loss)

    def put_away(self) -> None:
        """Leave each rank its parts: `reshard_after_forward=False` and evaluation leave those of blocks gathered."""
        for unit in self._units:
            unit.reshard()

    def detach(self) -> None:
        """Look no more."""
        while self._handles:
            self._handles.pop().remove()


def plain(tensor: Any) -> Any:
    """A packed tensor divided plainly, as checkpoints have it; anything else as it is."""
    if not is_packed(tensor):
        return tensor
    packed: Any = tensor.placements[-1]
    return _redistributed(tensor.detach(), Shard(packed.dim))


def divided_as(live: Any, saved: Any) -> Any:
    """A saved tensor, whole or divided plainly, divided as a live one is."""
    if not isinstance(live, DTensor) or saved.shape != live.shape:
        return saved
    if not isinstance(saved, DTensor):
        whole = [Replicate()] * live.device_mesh.ndim
        saved = DTensor.from_local(saved.to(live.device), live.device_mesh, whole, run_check=False)
        return saved.redistribute(placements=live.placements)
    return _redistributed(saved, live.placements[-1]) if is_packed(live) else saved


def _redistributed(tensor: Any, placement: Placement) -> Any:
    others = tensor.placements[:-1]  # from shard to shard of one dimension, torch may do nothing
    whole = tensor.redistribute(placements=(*others, Replicate()))
    return whole.redistribute(placements=(*others, placement))
