"""Paged states of bitsandbytes: memory that CUDA moves between device and host, which bitsandbytes tells by marks.

Copying a tensor (`copy.deepcopy`, `torch.load`) copies its marks, too, but puts the values in ordinary memory of the
host, whose address bitsandbytes would give to a kernel. And bitsandbytes never frees a paged buffer. Here is what is
really paged, and buffers that nobody holds any more are used again.

Written for bitsandbytes 0.50: `functional.get_paged`, `functional.fill`, `GlobalPageManager.paged_tensors`, and the
marks `is_paged` and `page_deviceid`; `tests/numerics/optim/test_paging.py` fails when these move.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MARKS = ("is_paged", "page_deviceid")


def is_marked(value: Any) -> bool:
    """Whether bitsandbytes takes a value for a paged tensor."""
    return bool(getattr(value, "is_paged", False))


def mark_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Mark a tensor in the memory of another as bitsandbytes marks that one, and return it."""
    for mark in _MARKS:
        if hasattr(other, mark):
            setattr(tensor, mark, getattr(other, mark))
    return tensor


def drop_false_marks(optimizer: Any) -> None:
    """Take the marks off states of an optimizer that are copies in ordinary memory."""
    from bitsandbytes.functional import GlobalPageManager

    marked = [value for state in optimizer.state.values() for value in state.values() if is_marked(value)]
    paged = {whole.untyped_storage().data_ptr() for whole in GlobalPageManager.get_instance().paged_tensors}
    for tensor in marked:
        if tensor.untyped_storage().data_ptr() not in paged:
            for mark in _MARKS:
                vars(tensor).pop(mark, None)


_FREE: defaultdict[Any, list[Tensor]] = defaultdict(list)
"""Buffers that no tensor uses any more, which bitsandbytes keeps for good."""


def paged_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, make: Callable[[], Tensor]
) -> Tensor:
    """Return a buffer of zeros: one that was dropped if there is any of the kind, or else a new one."""
    from bitsandbytes.functional import fill

    free = _FREE[(tuple(shape), dtype, device.index)]
    whole = free.pop() if free else make()
    if not is_marked(whole):
        return whole
    fill(whole, 0)
    array = whole.numpy().view()  # lives as long as the tensor that is returned, or any view of it
    weakref.finalize(array, free.append, whole).atexit = False
    return mark_like(torch.from_numpy(array), whole)
