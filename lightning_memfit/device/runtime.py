"""Memory of a run that no trace of tensors sees: the CUDA context, library workspaces, and a safety margin.

Workspaces are inside the caching allocator, so they count as `allocated`; the context is outside it, and only
`nvidia-smi` and `mem_get_info` show it. Figures with a stated rule come from torch; the context is an observation and
differs by driver, card and the kernels that get loaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning_memfit.memory import MIB

_ENVIRONMENT = "CUBLAS_WORKSPACE_CONFIG"
_LT_ENVIRONMENT = "CUBLASLT_WORKSPACE_SIZE"
_LT_UNIFIED = "TORCH_CUBLASLT_UNIFIED_WORKSPACE"


@dataclass(frozen=True)
class RuntimeMemory:
    """Bytes by origin, and where each figure comes from."""

    context_bytes: int
    """CUDA context, loaded kernels and library handles; outside the caching allocator."""
    workspace_bytes: int
    """One cuBLAS workspace."""
    num_workspaces: int
    """One per cuBLAS handle and stream. A training step has two handles: the caller's thread and autograd's."""
    source: str
    lt_workspace_bytes: int = 0
    """What cuBLASLt takes beside it once a handle's thread has multiplied matrices and added a bias in one kernel."""

    @property
    def allocated_bytes(self) -> int:
        """Most bytes that the workspaces add to `torch.cuda.memory_allocated`, with products of every kind."""
        return (self.workspace_bytes + self.lt_workspace_bytes) * self.num_workspaces


def runtime_memory(compute_capability: tuple[int, int] | None) -> RuntimeMemory:
    """Expected runtime memory of one process that trains on a CUDA device.

    cuDNN's convolution workspaces are left out: they depend on the chosen algorithm and are freed after each call.

    Raises:
        ValueError: If the environment variable `CUBLAS_WORKSPACE_CONFIG` or `CUBLASLT_WORKSPACE_SIZE` is malformed.
    """
    recent = compute_capability is None or compute_capability[0] >= 9
    return RuntimeMemory(
        context_bytes=(600 if recent else 450) * MIB,
        workspace_bytes=_workspace_bytes(recent),
        num_workspaces=2,  # backward runs in a thread with a cuBLAS handle of its own
        lt_workspace_bytes=_lt_workspace_bytes(),
        source=(
            "workspace: torch's aten/src/ATen/cuda/CublasHandlePool.cpp (32 MiB on Hopper, on Blackwell as of 2026, "
            ":4096:2:16:8 elsewhere) and aten/src/ATen/cuda/CUDABlas.cpp (1 MiB for cuBLASLt); "
            "context: 250 to 600 MiB reported with lazy module loading, upper end taken"
        ),
    )


def safety_margin_bytes(memory_bytes: int) -> int:
    """Bytes to leave free on a device: 2 % of it, at least 128 MiB.

    They cover kernel scratch memory, driver differences in the context, and fragmentation beyond the simulated one.
    """
    return max(128 * MIB, memory_bytes // 50)


def _workspace_bytes(recent: bool) -> int:
    config = os.environ.get(_ENVIRONMENT)
    if config:
        return _parse_workspace(config)
    return 32 * MIB if recent else _parse_workspace(":4096:2:16:8")


def _lt_workspace_bytes() -> int:
    """What cuBLASLt takes for itself: nothing where torch lets it use the workspace of cuBLAS."""
    if os.environ.get(_LT_UNIFIED) == "1":
        return 0
    size = os.environ.get(_LT_ENVIRONMENT, "1024")
    if not size.isdecimal():
        raise ValueError(f"`{_LT_ENVIRONMENT}={size}` is not a number of KiB, for example 1024.")
    return int(size) * 1024


def _parse_workspace(config: str) -> int:
    """Sum of `:size:count` pairs, sizes in KiB."""
    parts = config.removeprefix(":").split(":")
    if len(parts) % 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"`{_ENVIRONMENT}={config}` is not a list of :SIZE:COUNT pairs, for example :4096:2:16:8.")
    sizes, counts = parts[::2], parts[1::2]
    return sum(int(size) * int(count) for size, count in zip(sizes, counts, strict=True)) * 1024
