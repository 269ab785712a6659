"""`BufferCopies`: buffers as they were before a step, to put them back if the step is left out."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_LARGE_BYTES = 1 << 20
"""Larger buffers (tables, codes of quantized weights) are copied only once they have been seen to change."""

_Seen = tuple["weakref.ref[Tensor]", int] | None


class BufferCopies:
    """Copies of the buffers that training changes, on their own devices.

    At first buffers of up to 1 MiB are copied, and compared after a step. From then on a module's buffers are copied
    if one of them has changed: torch's batch norm counts its batches, but writes running statistics without raising
    the version by which a change is known. A module that has its first buffer after two steps is not looked at.

    Args:
        module: The module in training.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[nn.Module, _Kept] = {}
        self._children: list[nn.Module] = []
        self._walks_left = 2

    @torch.no_grad()
    def take(self) -> None:
        """Copy what changes, as it is now."""
        if self._walks_left:
            self._walks_left -= 1
            self._children = [child for child in self._module.modules() if child._buffers]
        for child in self._children:
            kept = self._kept.get(child)
            if kept is None:
                self._kept[child] = _Kept(_seen(child), _copies(child, _LARGE_BYTES))
                continue
            if not kept.changes and kept.has_changed(child):
                kept.changes, kept.copies = True, {}
            kept.seen = _seen(child)
            kept.copies = _copies(child, None, kept.copies) if kept.changes else {}

    @torch.no_grad()
    def put_back(self) -> tuple[bool, list[str]]:
        """Put all copied buffers back if one of them holds NaN or infinite values now where it held none before.

        Returns:
            Whether it was so, and names of buffers that are not finite now and of which there is no copy.
        """
        lost, is_broken = [], False
        for path, child in self._module.named_modules():
            kept = self._kept.get(child) or _Kept({}, {})
            for key, now in child._buffers.items():
                if now is None or is_lazy(now) or not _has_values(now):
                    continue
                if key in kept.copies:
                    is_broken |= _is_newly_broken(now, kept.copies[key])
                elif not _is_same(kept.seen.get(key), now) and not bool(_local(now).isfinite().all()):
                    lost.append(f"{path}.{key}".lstrip("."))
        if is_broken:
            for child, kept in self._kept.items():
                kept.restore(child)
        return is_broken, lost


@dataclass
class _Kept:
    """What is known of the buffers of one module, without those of its children."""

    seen: dict[str, _Seen]
    copies: dict[str, Tensor]
    changes: bool = False

    def has_changed(self, child: nn.Module) -> bool:
        """Whether one of them is another since it was seen; the first time the values themselves are compared."""
        if child._buffers.keys() != self.seen.keys():
            return True
        if not all(_is_same(self.seen[key], buffer) for key, buffer in child._buffers.items()):
            return True
        pairs = [(child._buffers[key], copy) for key, copy in self.copies.items()]
        return any(now is None or not torch.equal(_local(now), _local(copy)) for now, copy in pairs)

    def restore(self, child: nn.Module) -> None:
        for key, copy in self.copies.items():
            seen = self.seen[key]
            before = None if seen is None else seen[0]()
            if before is None or before.is_inference() or before.shape != copy.shape or before.dtype != copy.dtype:
                before = copy.clone()
            else:
                before.copy_(copy)
            child._buffers[key] = before
        for key, seen in self.seen.items():
            if seen is None and key in child._buffers:  # it was None
                child._buffers[key] = None


def _seen(child: nn.Module) -> dict[str, _Seen]:
    return {key: _identity(buffer) for key, buffer in child._buffers.items() if buffer is None or not is_lazy(buffer)}


def _identity(buffer: Tensor | None) -> _Seen:
    if buffer is None:
        return None
    return weakref.ref(buffer), 0 if buffer.is_inference() else buffer._version


def _is_same(seen: _Seen, buffer: Tensor | None) -> bool:
    """Whether a buffer is the tensor that was seen, unchanged as far as its version tells."""
    if seen is None or buffer is None:
        return seen is None and buffer is None
    return seen[0]() is buffer and (buffer.is_inference() or seen[1] == buffer._version)


def _copies(child: nn.Module, limit: int | None, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copy a module's buffers, those up to a limit of bytes, into earlier copies as far as they fit."""
    copies = {}
    for key, buffer in _given(child):
        if limit is not None and buffer.nbytes > limit:
            continue
        before = (into or {}).get(key)
        if before is not None and (before.shape, before.dtype) == (buffer.shape, buffer.dtype):
            copies[key] = before.copy_(buffer)
        else:
            copies[key] = buffer.detach().clone()
    return copies


def _given(child: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((key, buffer) for key, buffer in child._buffers.items() if buffer is not None and not is_lazy(buffer))


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a dense one."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.coalesce().values() if local.is_sparse else local


def _has_values(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.device.type != "meta"


def _is_newly_broken(now: Tensor, before: Tensor) -> bool:
    """Whether values are not finite that were; some buffers hold infinite ones from the start (masks, minima)."""
    finite = _local(now).isfinite()
    was = _local(before).isfinite()
    if finite.shape != was.shape:
        return not bool(finite.all())
    return bool((~finite & was.to(finite.device)).any())
