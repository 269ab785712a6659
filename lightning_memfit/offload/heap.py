"""What glibc does with freed memory: by default it keeps much of it, which a run near the limit can't afford."""

from __future__ import annotations

import ctypes
import platform

KEPT_BYTES = 256 * 1024
"""Blocks from this size are mapped one by one, and unmapped when they are freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def return_freed_memory() -> bool:
    """Have blocks of 256 KiB and more given back to the system when they are freed, from here on, in the whole process.

    Left alone, glibc raises its limit to the largest block freed so far, up to 32 MiB, and cuts smaller blocks out of
    heaps that only shrink from their ends: after the weights are built, gathered and reduced, hundreds of MiB stay
    with the process that no tensor uses. `mallopt` also ends that adaptation, so that a peak follows from the tensors.
    New blocks then come as untouched pages, which costs about a millisecond for 4 MiB.

    Returns:
        Whether the C library is glibc and took it; others are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
