"""Tensors that stand for host memory: masters, parked weights. Ledgers of a device leave them out.

Where a run's device is a GPU they lie elsewhere anyway. On the CPU, and in a trace on fake CPU tensors, only who made
them knows what they stand for.

`_disable_current_modes` is private torch API (there since 2.0): a simulated device is a dispatch mode, and a copy that
lies on "the host" must not count there, not even while it is made.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from lightning_memfit.memory.breakdown import Category

_storages: dict[int, Any] = {}


def keep_on_host(tensor: torch.Tensor, category: Category, serves: torch.Tensor | None = None) -> None:
    """Say that a tensor's storage stands for host memory, for as long as it lives.

    Args:
        tensor: On the CPU, or fake.
        category: What the bytes are for.
        serves: Tensor on the device that it belongs to, by which traces know its block.
    """
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in _storages:
        _storages[key] = weakref.ref(storage, lambda _: _storages.pop(key, None))
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "move_to_host"):
            mode.move_to_host(tensor, category, serves)


def copy_to_host(tensor: torch.Tensor, category: Category) -> torch.Tensor:
    """A copy of a tensor in host memory, not pinned. Of one on the CPU it stands for host memory.

    Args:
        tensor: Dense and real.
        category: What the bytes are for.
    """
    with _disable_current_modes(), torch.no_grad():
        host = tensor.detach().to("cpu", copy=True)
    keep_on_host(host, category)
    return host


def return_to_device(tensor: torch.Tensor) -> None:
    """Say that a tensor stands for host memory no longer."""
    _storages.pop(tensor.untyped_storage()._cdata, None)


def reserve_pinned(size_bytes: int, category: Category, serves: torch.Tensor) -> None:
    """Say that a run on CUDA keeps pinned host memory, which no tensor stands for here.

    Args:
        size_bytes: How much.
        category: What it is for.
        serves: Tensor on the device that it belongs to.
    """
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "note_pinned"):
            mode.note_pinned(size_bytes, category, serves)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether `keep_on_host` was told of the tensor's storage."""
    return tensor.untyped_storage()._cdata in _storages


def stands_for_host(storage: torch.UntypedStorage) -> bool:
    """Whether `keep_on_host` was told of a storage."""
    return storage._cdata in _storages
