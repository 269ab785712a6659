"""Non-public parts of torch and Lightning that a process group without other processes needs.

Written for torch 2.11 to 2.13 and Lightning 2.6.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.profile.replaced import replaced


@contextlib.contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """Be a rank of torch's `fake` process group, whose collectives return at once.

    Args:
        world_size: Ranks of the group.
        rank: The one that this process is.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _forget_meshes()
    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        # Ranks other than the sender would read what they have not been sent. All have the same objects.
        objects = replaced(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
        with objects, _numbers_of_works(), _unseen_propagation():
            yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        _forget_meshes()


@contextlib.contextmanager
def without_barriers() -> Iterator[None]:
    """Let Lightning go on after `prepare_data`, where it waits for other ranks over a gloo group that all of them make.

    A rank that traces may be the only one that does, and a group of torch's `fake` backend has no others.
    """
    from lightning.pytorch.trainer.connectors import data_connector

    with replaced(data_connector, "_InfiniteBarrier", contextlib.nullcontext):
        yield


@contextlib.contextmanager
def _numbers_of_works() -> Iterator[None]:
    """Number collectives on fakes in turn: torch draws a new number for each from Python's generator, the step's."""
    if find_spec("torch.distributed._meta_registrations") is None:  # older versions have none
        yield
        return
    from torch.distributed import _meta_registrations

    with replaced(_meta_registrations, "generate_unique_id", itertools.count(1).__next__):
        yield


def _forget_meshes() -> None:
    """Empty caches of DTensor, whose results name groups: a mesh of the same shape would find those of another."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


@contextlib.contextmanager
def _unseen_propagation() -> Iterator[None]:
    """Let DTensor find shapes of results on fakes of its own, as in a real run, unseen by other modes."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    find_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    @functools.wraps(find_shapes)
    def unseen(propagator: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return find_shapes(propagator, schema)

    with replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
        yield


def chunk_cat(tensors: list[torch.Tensor], dim: int, num_chunks: int, out: torch.Tensor) -> None:
    """Join the n-th chunks of all tensors, for every n, as FSDP2 does before it scatters gradients."""
    torch._chunk_cat(tensors, dim, num_chunks, out=out)
