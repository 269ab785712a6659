"""Mark tensors that represent host memory, such as master weights, so that a device's ledger leaves them out.

If a run's device is a GPU, such tensors are on another device anyway. On the CPU, and in a trace on fake CPU tensors,
only the code that makes them knows that they represent host memory.

`_disable_current_modes` is private torch API (since torch 2.0). It is needed because a simulated device is a dispatch
mode, and a copy in "host memory" must not count there, not even while it is made.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from lightning_memfit.memory.breakdown import Category


@dataclass
class _Mark:
    """What is known of a storage in host memory; neither it nor what it serves is kept alive."""

    storage: "weakref.ref[torch.UntypedStorage]"
    category: Category
    serves: "weakref.ref[torch.Tensor] | None"


_storages: dict[int, _Mark] = {}

SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc}
"""Layouts of tensors that have no storage of their own."""


def keep_on_host(tensor: torch.Tensor, category: Category, serves: torch.Tensor | None = None) -> None:
    """Mark a tensor's storage as host memory, for as long as it lives; those of a sparse one.

    Args:
        tensor: A tensor on the CPU, or a fake one.
        category: What the bytes are used for.
        serves: Tensor on the device that it belongs to, from which traces know its block and `host_memory_of` knows
            whose it is.
    """
    if tensor.layout in SPARSE:
        served = None if serves is None else sparse_parts(serves)[-1]
        for part in sparse_parts(tensor):
            keep_on_host(part, category, served)
        return
    storage = tensor.untyped_storage()
    key = storage._cdata
    owner = None if serves is None else weakref.ref(serves)
    if key not in _storages:
        _storages[key] = _Mark(weakref.ref(storage, lambda _: _storages.pop(key, None)), category, owner)
    elif owner is not None:
        _storages[key].category, _storages[key].serves = category, owner
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "move_to_host"):
            mode.move_to_host(tensor, category, serves)


def copy_to_host(tensor: torch.Tensor, category: Category) -> torch.Tensor:
    """Copy a tensor to host memory that is not pinned. The copy is marked as host memory.

    Args:
        tensor: A dense, real tensor.
        category: What the bytes are used for.
    """
    with _disable_current_modes(), torch.no_grad():
        host = tensor.detach().to("cpu", copy=True)
    keep_on_host(host, category)
    return host


def return_to_device(tensor: torch.Tensor) -> None:
    """Remove the mark of a tensor's storage: it no longer represents host memory."""
    for part in sparse_parts(tensor):
        _storages.pop(part.untyped_storage()._cdata, None)


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold a sparse tensor: indices and values. A strided tensor is its own only part."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def reserve_pinned(size_bytes: int, category: Category, serves: torch.Tensor) -> None:
    """Tell traces that a run on CUDA keeps pinned host memory for which no tensor exists here.

    Args:
        size_bytes: Size in bytes.
        category: What the bytes are used for.
        serves: Tensor on the device that it belongs to.
    """
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "note_pinned"):
            mode.note_pinned(size_bytes, category, serves)


def host_memory_of(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.UntypedStorage, Category]]:
    """Yield the storages in host memory that serve some tensors, and what their bytes are used for.

    Args:
        tensors: What was given to `keep_on_host` as `serves`.
    """
    wanted = {id(tensor) for tensor in tensors}
    for mark in list(_storages.values()):
        storage, served = mark.storage(), None if mark.serves is None else mark.serves()
        if storage is not None and served is not None and id(served) in wanted:
            yield storage, mark.category


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether `keep_on_host` has marked the tensor's storage."""
    return tensor.untyped_storage()._cdata in _storages


def stands_for_host(storage: torch.UntypedStorage) -> bool:
    """Whether `keep_on_host` has marked a storage."""
    return storage._cdata in _storages
