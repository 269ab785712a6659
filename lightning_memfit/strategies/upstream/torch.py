"""Non-public parts of torch that FSDP2 and tensor parallelism need, written for torch 2.11 to 2.13.

A module's own parameters are replaced while it runs, and fused weights, `q|k|v`, are divided so that a rank has its
part of each. torch has no public placement for that: `_StridedShard`, written for FSDP2 over tensor parallelism,
describes it, and no other module names it. A distributed checkpoint stores one rectangle per rank, which such a part is
not. There the same tensor is therefore divided plainly, so that checkpoints don't depend on the division.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


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


def announce_backward(root: Any, loss: Tensor) -> None:
    """Let FSDP2 end a backward pass that begins before its forward pass is over, as in manual optimization.

    It reduces gradients at the end of a pass that has come through what a module's forward returned, and through that
    of the whole `training_step` none does: without repeated blocks, gradients would reach no optimizer.
    """
    root._get_fsdp_state()._register_pre_backward_hook(loss)


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
