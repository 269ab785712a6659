"""`SimulatedDevice`: a device with a memory limit, made of real tensors and real compute on whatever is there."""

from typing import Any

import torch

from lightning_memfit.device.allocator import CachingAllocator
from lightning_memfit.memory import Category, format_bytes, parse_bytes
from lightning_memfit.memory.ledger import StorageLedger


class SimulatedDevice(StorageLedger):
    """Follow live storages and raise `torch.OutOfMemoryError` when they would exceed a limit.

    The error is the class that CUDA raises, its message has the same form. The refused output is released before the
    error is raised, and neither `live_bytes` nor `peak_bytes` ever include it.

    One thing differs from a real device: the operator has run by the time its output is refused. An operator that also
    changes an input in place (running statistics of a batch norm) or draws random numbers has done so.

    Args:
        limit_bytes: Capacity, `"12GiB"` or an integer.
        rounding_bytes: Sizes are rounded up to a multiple of this, 512 like the CUDA caching allocator.
        caching: Hold `reserved` bytes, as simulated by `CachingAllocator`, against the limit instead of live bytes, so
            that fragmentation counts, too.

    Attributes:
        num_ooms: Errors raised so far.
        allocator: The simulated caching allocator, None without `caching`.
    """

    def __init__(self, limit_bytes: int | str, rounding_bytes: int = 512, caching: bool = False) -> None:
        super().__init__(rounding_bytes)
        self.limit_bytes = parse_bytes(limit_bytes, "limit_bytes")
        self.allocator = CachingAllocator(self.limit_bytes) if caching else None
        self.num_ooms = 0
        self._allocated_bytes = 0  # since the start of the operator
        self._refused = False

    @property
    def used_bytes(self) -> int:
        """What is held against the limit: reserved bytes with `caching`, live bytes without."""
        return self.live_bytes if self.allocator is None else self.allocator.reserved_bytes

    def on_allocate(self, identity: int, size_bytes: int, category: Category, name: str) -> None:
        """Hold a new storage against the limit."""
        self._allocated_bytes += size_bytes
        if self.allocator is None:
            self._refused |= self.live_bytes > self.limit_bytes
        else:
            self._refused |= not self.allocator.malloc(identity, size_bytes)

    def on_free(self, identity: int, size_bytes: int, category: Category) -> None:
        """Give a storage back."""
        if self.allocator is not None and identity in self.allocator:  # a refused storage never was
            self.allocator.free(identity)

    def on_resize(self, identity: int, size_bytes: int) -> None:
        """Replace a storage by one of another size."""
        self.on_free(identity, 0, Category.TEMPORARY)
        self.on_allocate(identity, size_bytes, Category.TEMPORARY, "resize_")

    def track(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Enter a tensor that exists already.

        Raises:
            torch.OutOfMemoryError: If it does not fit. The caller still holds the tensor, so it stays entered until the
                caller lets it go.
        """
        peak = self._begin()
        super().track(tensor, category, name)
        if self._refused:
            self._raise(peak)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        peak = self._begin()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._refused:
            del result  # before the traceback can keep it alive
            self._raise(peak)
        return result

    def _begin(self) -> tuple[int, dict[Category, int], int]:
        self._allocated_bytes = 0
        self._refused = False
        return self.peak_bytes, self.peak_by_category, self._first_after_peak

    def _raise(self, peak: tuple[int, dict[Category, int], int]) -> None:
        self.peak_bytes, self.peak_by_category, self._first_after_peak = peak
        self._refused = False
        self.num_ooms += 1
        raise torch.OutOfMemoryError(self._message())

    def _message(self) -> str:
        free_bytes = max(0, self.limit_bytes - self.used_bytes)
        live = ", ".join(f"{category} {format_bytes(n)}" for category, n in self.live_by_category.items() if n)
        reserved = "" if self.allocator is None else f" {format_bytes(self.allocator.reserved_bytes)} is reserved."
        return (
            f"CUDA out of memory. Tried to allocate {format_bytes(self._allocated_bytes)}. GPU 0 has a total capacity "
            f"of {format_bytes(self.limit_bytes)} of which {format_bytes(free_bytes)} is free (simulated).{reserved} "
            f"Of the allocated memory: {live or 'nothing'}."
        )
