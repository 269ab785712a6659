"""Paged states of bitsandbytes: memory that CUDA moves between device and host, which bitsandbytes tells by marks.

Copying a tensor (`copy.deepcopy`, `torch.load`) copies its marks, too, but puts the values in ordinary memory of the
host, whose address bitsandbytes would give to a kernel. And bitsandbytes never frees a paged buffer. Here is what is
really paged, and buffers that nobody holds any more are used again.

Written for bitsandbytes 0.50: `functional.get_paged`, `functional.fill`, `GlobalPageManager.paged_tensors`, and the
marks `is_paged` and `page_deviceid`; `tests/numerics/optim/test_paging.py` fails when these move.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

_MARKS = ("is_paged", "page_deviceid")
_Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype, int | None]


def is_marked(tensor: Tensor) -> bool:
    """Whether bitsandbytes takes a tensor for a paged one."""
    return bool(getattr(tensor, "is_paged", False))


def mark_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Mark a tensor in the memory of another as bitsandbytes marks that one, and return it."""
    for mark in _MARKS:
        if hasattr(other, mark):
            setattr(tensor, mark, getattr(other, mark))
    return tensor


def drop_false_marks(tensors: Iterable[Tensor]) -> None:
    """Take the marks off tensors that are copies in ordinary memory."""
    from bitsandbytes.functional import GlobalPageManager

    marked = [tensor for tensor in tensors if is_marked(tensor)]
    if not marked:
        return
    paged = {whole.untyped_storage().data_ptr() for whole in GlobalPageManager.get_instance().paged_tensors}
    for tensor in marked:
        if tensor.untyped_storage().data_ptr() not in paged:
            for mark in _MARKS:
                vars(tensor).pop(mark, None)


class _Lent:
    """A paged buffer, which bitsandbytes keeps for good, and the array through which its borrower holds it."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole
        self._array: weakref.ref[Any] = lambda: None  # type: ignore[assignment]

    @property
    def is_free(self) -> bool:
        """Whether no tensor uses the memory any more: neither the borrowed one nor a view of it."""
        return self._array() is None

    def lend(self) -> Tensor:
        """Return a tensor with a storage of its own in the buffer's memory; the storage keeps the array alive."""
        array = self._whole.numpy().view()
        self._array = weakref.ref(array)
        return mark_like(torch.from_numpy(array), self._whole)


_LENT: defaultdict[_Kind, list[_Lent]] = defaultdict(list)


def paged_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, make: Callable[[], Tensor]
) -> Tensor:
    """Return a buffer of zeros: one that was dropped if there is any of the kind, or else a new one."""
    from bitsandbytes.functional import fill

    known = _LENT[(tuple(shape), dtype, device.index)]
    free = next((lent for lent in known if lent.is_free), None)
    if free is not None:
        buffer = free.lend()
        fill(buffer, 0)
        return buffer
    whole = make()
    if not is_marked(whole):
        return whole
    known.append(_Lent(whole))
    return known[-1].lend()
