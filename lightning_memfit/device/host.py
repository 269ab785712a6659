"""Read what is free on this machine: host memory under cgroup limits. Needs no torch."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number


@dataclass(frozen=True)
class HostState:
    """Host memory that this process may use now."""

    total_bytes: int
    """RAM, or the cgroup's limit where that is lower."""
    available_bytes: int
    """RAM that can be taken without swapping, cgroup limits considered; reclaimable page cache counts."""
    memlock_limit_bytes: int | None
    """Limit of locked memory (`ulimit -l`); None is unlimited. It binds io_uring and `mlock`, but not CUDA's pinned
    memory."""


def probe_host(cgroup_root: Path = _CGROUP, proc_cgroup: Path | None = None) -> HostState:
    """Read RAM and the limit of locked memory. Touches no CUDA."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in _cgroup_limits(cgroup_root, proc_cgroup or Path("/proc/self/cgroup")):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return HostState(total, available, _memlock_limit())


def _memlock_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    if _may_lock_all():
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _may_lock_all(status: Path = Path("/proc/self/status")) -> bool:
    """Whether the process has CAP_IPC_LOCK, which lifts the limit. Root has it, but in containers often not."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(effective >> 14 & 1)


def _cgroup_limits(root: Path, proc_cgroup: Path) -> list[tuple[int, int]]:
    """`(limit, used without reclaimable cache)` of the process's cgroup and each of its parents, v2 or v1."""
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            base = root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        limits += [found for folder in _upwards(base, inside) if (found := _limit_of(folder, *names))]
    return limits


def _upwards(base: Path, inside: str) -> list[Path]:
    """The cgroup's folder and its parents. In a container the inner path may be missing; then only the base exists."""
    folder = Path(os.path.normpath(base / inside.lstrip("/")))
    if not folder.is_relative_to(base):  # a namespace's "/../.."
        return [base]
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]


def _limit_of(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_name).read_text())  # "max" is not a number
        used = int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit >= _UNLIMITED:
        return None
    return limit, max(0, used - int(statistics.get(cache_name, 0)))
