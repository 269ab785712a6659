"""What collectives take from a rank's memory while they run, and which of a rank's tensors are for communication.

`gloo` works in memory of the process. Gathering fills a buffer as large as the result and copies it, and scattering
reduces a copy of the input (`ProcessGroupGloo.cpp`, torch 2.11-2.13; `benchmarks.sharded_traces` measures it).
NCCL takes nothing from torch's allocator: its buffers belong to the communicator (`estimate.deepspeed.NCCL_BYTES`).

FSDP2 keeps references to the tensors of a running collective (`AllGatherState`, `ReduceScatterState` and
`AllReduceState` in torch's `_fsdp_param_group.py`) until the next collective of the kind has waited for it, whatever
the device is. On the CPU its events and streams do nothing, but the references live as long, so that a trace on the CPU
shows the lifetimes of CUDA, too: a gathered buffer until the next block is gathered in forward, a block's gradients
until the next block's are reduced in backward. What reuse between streams costs on CUDA is the allocator's and no live
tensor.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_memfit.memory.ledger import tensors_among

_GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "all_gather_into_tensor")
_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor")
_NAMESPACES = ("c10d", "_c10d_functional", "fsdp")
_COMPOSED: dict[str, Callable[..., Any]] = {
    "chunk_cat": torch._chunk_cat,  # the n-th chunks of all tensors, for every n, before gradients are scattered
    "split_with_sizes_copy": torch.split_with_sizes_copy,
}


@functools.cache
def _named(operator: Any) -> tuple[str, str]:
    """Namespace and name of an operator."""
    return operator.namespace, operator._opname


@functools.cache
def communicates(operator: Any) -> bool:
    """Whether an operator is a collective or copies into or out of the buffers of one."""
    return _named(operator)[0] in _NAMESPACES


def scratch_bytes(operator: Any, args: Any, result: Any) -> int | None:
    """Bytes that gloo takes for a collective while it runs; None for one that never takes any."""
    namespace, name = _named(operator)
    if namespace == "fsdp":
        return None
    whole = args[:1] if namespace == "c10d" else (result,)
    if name in _GATHERS:
        return sum(tensor.nbytes for tensor in tensors_among(whole))
    if name in _SCATTERS:
        return sum(tensor.nbytes for tensor in tensors_among(args[1:2] if namespace == "c10d" else args[:1]))
    return None


def buffers(operator: Any, args: Any, kwargs: Any, result: Any) -> Iterator[torch.Tensor]:
    """Tensors among an operator's that are there for communication alone: gathered weights, gradients to scatter."""
    namespace, name = _named(operator)
    if namespace == "fsdp":
        yield from tensors_among(args[1:2] if name == "all_gather_copy_in" else (kwargs.get("out", args[-1]),))
    elif name in _GATHERS or name == "allreduce_":
        yield from tensors_among(args[:1] if namespace == "c10d" else (result,))
    elif name in _SCATTERS:
        yield from tensors_among(args[1:2] if namespace == "c10d" else args[:1])


@functools.cache
def composed_of(operator: Any) -> Callable[..., Any] | None:
    """What FSDP2's own operator runs on the CPU, in operators whose kernels are known; None for every other one."""
    namespace, name = _named(operator)
    if namespace != "fsdp" or name not in _COMPOSED:
        return None

    def run(*args: Any, **kwargs: Any) -> None:
        _COMPOSED[name](*args, **kwargs)

    return run
