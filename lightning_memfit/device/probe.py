"""Read what is free on the CUDA device."""

from dataclasses import dataclass

import torch

from lightning_memfit.memory.kind import cuda_device


@dataclass(frozen=True)
class DeviceState:
    """State of a CUDA device now."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    """Total memory as torch reports it; the instance's under MIG."""
    free_bytes: int
    """Free for a new allocation by any process (`cudaMemGetInfo`)."""
    allocated_bytes: int
    """Allocated by this process's tensors."""
    reserved_bytes: int
    """Reserved by this process's caching allocator; free to its own tensors, not to other processes."""

    @property
    def available_bytes(self) -> int:
        """Bytes that tensors of this process can still take: free memory and its own unused cache."""
        return self.free_bytes + self.reserved_bytes - self.allocated_bytes


def probe_device(index: int = 0) -> DeviceState:
    """Read the state of a CUDA device. This initialises CUDA in the process.

    Raises:
        RuntimeError: If there is no CUDA device.
        ValueError: If the index is out of range.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("No CUDA device is available. Name one from the catalogue instead, or a size such as 12GiB.")
    if not 0 <= index < torch.cuda.device_count():
        raise ValueError(f"`index={index}` is out of range: there are {torch.cuda.device_count()} CUDA devices.")
    device = cuda_device(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceState(
        index=index,
        name=torch.cuda.get_device_name(device),
        compute_capability=torch.cuda.get_device_capability(device),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        allocated_bytes=torch.cuda.memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
    )
