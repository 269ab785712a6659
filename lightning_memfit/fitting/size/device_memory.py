"""`DeviceMemory`: how much device memory there is and how much is in use."""

from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer

from lightning_memfit.memory.kind import CUDA, DeviceKind


class DeviceMemory(Protocol):
    """What fitting reads from a device. A `SimulatedDevice` implements it."""

    @property
    def limit_bytes(self) -> int:
        """Bytes that this process may use."""

    @property
    def live_bytes(self) -> int:
        """Bytes of live tensors."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive since `reset_peak`."""

    def reset_peak(self) -> None:
        """Start a new peak."""


class CudaMemory:
    """The caching allocator of one CUDA device; memory that other processes use now is not available."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def limit_bytes(self) -> int:
        """Free memory of the card plus what this process has reserved, within the per-process memory fraction."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._device) * total_bytes)
        return min(allowed, free_bytes + torch.cuda.memory_reserved(self._device))

    @property
    def live_bytes(self) -> int:
        """Bytes allocated."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """The most bytes reserved since `reset_peak`, which must fit the card."""
        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        """Empty the cache and start a new peak."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def find_device_memory(trainer: Trainer) -> DeviceMemory | None:
    """Return the memory of the Trainer's device: a `MemoryLimit`'s simulated device, CUDA's allocator, or None."""
    for callback in _limits(trainer):
        ledger: DeviceMemory | None = callback.ledger
        if ledger is not None:
            return ledger
    device = trainer.strategy.root_device
    return CudaMemory(device) if DeviceKind.of(device).has_caching_allocator else None


def knows_limit(trainer: Trainer) -> bool:
    """Whether `find_device_memory` will find one once training starts."""
    return bool(_limits(trainer)) or DeviceKind.of(trainer.strategy.root_device).has_caching_allocator


def rounding_of(trainer: Trainer) -> int:
    """Return the multiple to which sizes on the Trainer's device are rounded; a `MemoryLimit` rounds as CUDA does."""
    return DeviceKind.of(CUDA if _limits(trainer) else trainer.strategy.root_device).rounding_bytes


def _limits(trainer: Trainer) -> list[Any]:
    """The Trainer's `MemoryLimit`, known by its name: a run without one loads no simulated device."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in callbacks if any(kind.__name__ == "MemoryLimit" for kind in type(one).__mro__)]
