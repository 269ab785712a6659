"""Limits of memory and disk that would hinder training or offloading, as findings."""

from __future__ import annotations

from lightning_memfit.device.health import Finding
from lightning_memfit.memory import GIB, MIB, format_bytes

MIN_HOST_BYTES = 4 * GIB
"""Below this, importing the libraries and building a small model is a squeeze."""

MIN_SHARED_BYTES = 1 * GIB
"""Loader workers hand batches over in /dev/shm; Docker's default of 64 MiB ends them with a bus error."""

MIN_DISK_BYTES = 10 * GIB
MIN_DISK_BYTES_PER_S = 500e6
"""A SATA drive's rate; below it an optimizer step from disk takes minutes per billion parameters."""

MIN_LOCKED_BYTES = 64 * MIB
"""Two buffers of a gigabyte are common, but with less than this not even asynchronous I/O's queues can be set up."""


def check_host_memory(total_bytes: int, available_bytes: int, cgroup_bytes: int | None) -> Finding:
    """RAM, as far as this process may use it.

    Args:
        total_bytes: Of the machine.
        available_bytes: Without swapping, cgroup limits considered.
        cgroup_bytes: Limit of the control group; None without one.
    """
    found = f"{format_bytes(available_bytes)} free of {format_bytes(total_bytes)}"
    if cgroup_bytes is not None and cgroup_bytes < total_bytes:
        found += f", limited to {format_bytes(cgroup_bytes)} by the control group"
    if available_bytes >= MIN_HOST_BYTES:
        return Finding("host memory", "ok", found)
    fix = "end other programs, or raise the container's limit (docker run --memory, Kubernetes resources.limits.memory)"
    return Finding("host memory", "problem", found, fix)


def check_locked_memory(limit_bytes: int | None) -> Finding:
    """Locked memory (`ulimit -l`), which asynchronous disk I/O and mlock are bound by; CUDA's pinned memory is not.

    Args:
        limit_bytes: None where there is no limit.
    """
    if limit_bytes is None:
        return Finding("locked memory", "ok", "unlimited")
    found = f"limited to {format_bytes(limit_bytes)}"
    if limit_bytes >= MIN_LOCKED_BYTES:
        return Finding("locked memory", "ok", found)
    fix = "to offload to disk: `ulimit -l unlimited`, memlock in /etc/security/limits.conf, docker --ulimit memlock=-1"
    return Finding("locked memory", "note", found, fix)


def check_shared_memory(total_bytes: int | None, free_bytes: int) -> Finding:
    """Shared memory for loader workers.

    Args:
        total_bytes: Size of /dev/shm; None where there is none.
        free_bytes: Free of it.
    """
    if total_bytes is None:
        return Finding(
            "/dev/shm", "note", "not there", "none needed with `num_workers: 0`; otherwise mount a tmpfs there"
        )
    found = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    if free_bytes >= MIN_SHARED_BYTES:
        return Finding("/dev/shm", "ok", found)
    fix = "start the container with --shm-size=8g or --ipc=host, or set `num_workers: 0`"
    return Finding("/dev/shm", "problem", found, fix)


def check_disk_space(folder: str, free_bytes: int) -> Finding:
    """Room for checkpoints and offloaded states."""
    found = f"{format_bytes(free_bytes)} free at {folder}"
    if free_bytes >= MIN_DISK_BYTES:
        return Finding("disk space", "ok", found)
    return Finding(
        "disk space", "problem", found, "free some, or name another folder with --folder: checkpoints need room"
    )


def check_direct_io(folder: str, error: str | None) -> Finding:
    """Whether files can be opened with O_DIRECT, past the page cache, as offloading to disk does.

    Args:
        folder: Where it was tried.
        error: What the system said; None where it worked.
    """
    if error is None:
        return Finding("O_DIRECT", "ok", f"works in {folder}")
    fix = (
        "to offload name a folder on a local ext4 or xfs drive with --folder; network and overlay file systems lack it"
    )
    return Finding("O_DIRECT", "note", f"{error} in {folder}", fix)


def check_disk_speed(write_bytes_per_s: float, read_bytes_per_s: float) -> Finding:
    """Sequential speed, which offloading to disk is bound by."""
    found = f"writes {write_bytes_per_s / 1e9:.2f} GB/s, reads {read_bytes_per_s / 1e9:.2f} GB/s"
    if min(write_bytes_per_s, read_bytes_per_s) >= MIN_DISK_BYTES_PER_S:
        return Finding("disk speed", "ok", found)
    return Finding("disk speed", "note", found, "fine for checkpoints; for offloading name a folder on an NVMe drive")
