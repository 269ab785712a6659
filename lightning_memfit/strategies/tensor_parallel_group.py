"""What ranks that compute one model together must have in common: the batch, and the random numbers of dropout."""

from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh


def share_random_state(mesh: DeviceMesh, device: torch.device) -> None:
    """Give all ranks of a group the random state of its first one, of the CPU and of the device.

    Dropout on what all ranks hold must drop the same. On the heads that a rank holds it drops the same positions as on
    other ranks' heads.
    """
    first = distributed.get_global_rank(mesh.get_group(), 0)
    state = torch.get_rng_state().to(device)
    distributed.broadcast(state, first, group=mesh.get_group())
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        distributed.broadcast(state, first, group=mesh.get_group())
        torch.cuda.set_rng_state(state.cpu(), device)


def check_same_batch(batch: Any, mesh: DeviceMesh, device: torch.device, stage: str) -> None:
    """Compare a batch over the ranks of a group by number of elements, sum and weighted sum of its tensors.

    Raises:
        MisconfigurationException: On every rank of the group, if they were given different batches.
    """
    mine = _fingerprint(batch).to(device)
    all_of_them = [torch.empty_like(mine) for _ in range(mesh.size())]
    distributed.all_gather(all_of_them, mine, group=mesh.get_group())
    if any(not torch.equal(theirs, mine) for theirs in all_of_them):
        raise MisconfigurationException(
            f"`tensor_parallel_size={mesh.size()}`: ranks that compute one model together were given different batches "
            f"in {stage}. Leave the sampler to Lightning (`use_distributed_sampler: true`), or make your own with "
            "`trainer.distributed_sampler_kwargs` instead of `world_size` and `global_rank`; draw nothing at random "
            "from a generator that is seeded by rank."
        )


def _fingerprint(batch: Any) -> Tensor:
    total = torch.zeros(3, dtype=torch.float64)

    def add(tensor: Tensor) -> Tensor:
        values = tensor.detach().reshape(-1).to("cpu", torch.float64)
        weights = torch.arange(1, len(values) + 1, dtype=torch.float64) % 8191
        total.add_(torch.stack([torch.tensor(float(len(values))), values.sum(), values @ weights]))
        return tensor

    apply_to_collection(batch, Tensor, add)
    return torch.nan_to_num(total)
