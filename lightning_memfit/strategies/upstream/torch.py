"""Non-public parts of torch that FSDP2 and tensor parallelism need, written for torch 2.11 to 2.13.

A module's own parameters are replaced while it runs, and fused weights, `q|k|v`, are divided so that a rank has its
part of each. torch has no public placement for that: `_StridedShard`, written for FSDP2 over tensor parallelism,
describes it, and no other module names it. A distributed checkpoint stores one rectangle per rank, which such a part is
not. In state dicts the same tensor is therefore divided plainly, so that checkpoints don't depend on the division.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer
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


def announce_backward(root: Any, loss: Tensor) -> None:
    """Let FSDP2 end a backward pass that begins before its forward pass is over, as in manual optimization.

    It reduces gradients at the end of a pass that has come through what a module's forward returned, and through that
    of the whole `training_step` none does: without repeated blocks, gradients would reach no optimizer.
    """
    root._get_fsdp_state()._register_pre_backward_hook(loss)


def save_plainly(module: nn.Module) -> list[RemovableHandle]:
    """Make a module's own packed parameters plain in its state dict, and packed again when one is loaded."""

    def saved(owner: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in own_parameters(owner).items():
            key = prefix + name
            if is_packed(parameter) and isinstance(state.get(key), DTensor):
                state[key] = _plain(state[key])

    def loaded(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in own_parameters(owner).items():
            key = prefix + name
            if is_packed(parameter) and isinstance(state.get(key), DTensor):
                state[key] = _like(state[key], parameter)

    return [module.register_state_dict_post_hook(saved), module.register_load_state_dict_pre_hook(loaded)]


def save_states_plainly(optimizer: Optimizer) -> None:
    """Do the same for the optimizer states of packed parameters."""

    def saved(_: Optimizer, state: dict[str, Any]) -> None:
        state["state"] = {
            key: {name: _plain(value) for name, value in values.items()} for key, values in state["state"].items()
        }

    def loaded(owner: Optimizer, state: dict[str, Any]) -> None:
        keys = [key for group in state["param_groups"] for key in group["params"]]  # indices, or names
        parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
        by_key = dict(zip(keys, parameters, strict=False))  # torch itself refuses groups of other sizes
        state["state"] = {
            key: {name: _like(value, by_key.get(key)) for name, value in values.items()}
            for key, values in state["state"].items()
        }

    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loaded)


def _plain(tensor: Any) -> Any:
    if not is_packed(tensor):
        return tensor
    packed: Any = tensor.placements[-1]
    return _redistributed(tensor.detach(), Shard(packed.dim))


def _like(tensor: Any, parameter: Tensor | None) -> Any:
    if is_packed(parameter) and isinstance(tensor, DTensor) and tensor.shape == parameter.shape:
        return _redistributed(tensor, parameter.placements[-1])
    return tensor


def _redistributed(tensor: Any, placement: Placement) -> Any:
    others = tensor.placements[:-1]
    whole = tensor.redistribute(
        placements=(*others, Replicate())
    )  # from shard to shard of one dimension, torch may do nothing
    return whole.redistribute(placements=(*others, placement))
