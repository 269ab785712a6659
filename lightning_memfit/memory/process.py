"""Read how much memory this process uses from the system and the driver, and make it return freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import NamedTuple

import torch


def rss_bytes() -> int:
    """Resident set size of this process in bytes, now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Largest resident set size of this process in bytes since it started."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB everywhere but on macOS


def swapped_out_bytes() -> int | None:
    """Bytes of this process that are in swap space now; None where the system does not tell (not Linux)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            found = next((line for line in lines if line.startswith("VmSwap:")), None)
    except OSError:
        return None
    return None if found is None else int(found.split()[1]) * 1024


def pinned_bytes() -> int | None:
    """Bytes of page-locked host memory that torch's allocator holds for CUDA, cache included; None without CUDA."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    current = torch.cuda.host_memory_stats().get("allocated_bytes.current")
    return None if current is None else int(current)


class NvmlUsage(NamedTuple):
    """Bytes in use according to the driver."""

    card_bytes: int
    """Used by every process on the card."""
    process_bytes: int | None
    """Used by this process: tensors, cache, CUDA context and libraries. None where the driver does not tell, as in a
    container with its own process ids."""


def nvml_usage(device: torch.device) -> NvmlUsage | None:
    """Ask NVML for the memory in use on a CUDA device, which is found by its UUID whatever `CUDA_VISIBLE_DEVICES` says.

    Under MIG the figures are those of the instance when the driver grants them.

    Returns:
        The usage, or None where NVML is absent or refuses: callers report that and go on.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = _handle(str(torch.cuda.get_device_properties(device).uuid))
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        by_process = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        return NvmlUsage(used, by_process.get(os.getpid()))
    except pynvml.NVMLError:
        return None


def _handle(uuid: str) -> object:
    import pynvml

    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError_NotFound:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


# --- freed memory -----------------------------------------------------------------------------------------------------


KEPT_BYTES = 256 * 1024
"""Blocks from this size are mapped one by one, and unmapped when they are freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def return_freed_memory() -> bool:
    """Make the C library return freed blocks of 256 KiB and more to the system, from now on in the whole process.

    By default glibc raises its limit to the largest block freed so far, up to 32 MiB, and cuts smaller blocks out of
    heaps that only shrink from their ends: after the weights are built, gathered and reduced, the process keeps
    hundreds of MiB that no tensor uses. `mallopt` also ends that adaptation, so that a peak follows from the tensors.
    New blocks then come as untouched pages, which costs about a millisecond for 4 MiB.

    Returns:
        Whether it worked; False without glibc, where nothing changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
