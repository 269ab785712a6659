"""Find problems of a machine that hinder training: in its software, its memory, its disk.

Each check takes plain facts and returns a `Finding` with a fix; `examine` gathers the facts of this machine.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from lightning_memfit.device.host import HostState, probe_host
from lightning_memfit.device.storage import measure_storage
from lightning_memfit.memory import GIB, MIB, format_bytes

Level = Literal["ok", "note", "problem"]
"""`note`: absent, but only some features need it. `problem`: hinders training on the hardware that is here."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    level: Level
    found: str
    """What was found."""
    fix: str = ""
    """What to do; empty if nothing is wrong."""


def hinders(findings: list[Finding]) -> bool:
    """Whether any finding is a problem."""
    return any(finding.level == "problem" for finding in findings)


def finding(name: str, is_ok: bool, found: str, fix: str, level: Level = "problem") -> Finding:
    """A finding that is `ok` and has no fix, or the one that is described."""
    return Finding(name, "ok", found) if is_ok else Finding(name, level, found, fix)


_NO_GPU = "none needed for the CPU; for a card install the NVIDIA driver; in a container start it with `--gpus all`"
_FOR_CUDA = "update the driver to one for this CUDA, check CUDA_VISIBLE_DEVICES, start a container with `--gpus all`"
_CPU_BUILD = "reinstall torch: pip install torch --index-url https://download.pytorch.org/whl/cu128"


def check_gpu(driver: str | None, nvml: str | None, build: str | None, available: bool) -> list[Finding]:
    """Check driver, NVML and CUDA. A machine without a driver trains on the CPU."""
    has_driver, built_for = driver is not None, f"torch built for {f'CUDA {build}' if build else 'the CPU'}"
    ask = "see what `nvidia-smi` says, which asks NVML, too; it tells how much memory each process uses"
    return [
        finding("driver", has_driver, f"NVIDIA {driver}" if has_driver else "no NVIDIA driver", _NO_GPU, "note"),
        finding("NVML", nvml is None, nvml or "answers", ask if has_driver else _NO_GPU, "note"),
        finding("CUDA", available, built_for, _FOR_CUDA if build else _CPU_BUILD)
        if has_driver
        else finding("CUDA", available, built_for, _NO_GPU, "note"),
    ]


def check_bitsandbytes() -> Finding:
    """Check that bitsandbytes, which 8-bit optimizers need, can be imported."""
    try:
        import bitsandbytes
    except Exception as error:  # any error is the finding
        fix = "pip install 'bitsandbytes>=0.50,<0.51'; `python -m bitsandbytes` says what is missing"
        return Finding("bitsandbytes", "problem", f"{type(error).__name__}: {error}", fix)
    return Finding("bitsandbytes", "ok", bitsandbytes.__version__)


def check_versions(installed: Mapping[str, str | None], requirements: list[str]) -> list[Finding]:
    """Check that the version of every required distribution is in the range that this package was tested with."""
    from packaging.requirements import Requirement

    findings = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed.get(requirement.name)
        accepted = found is not None and requirement.specifier.contains(found, prereleases=True)
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        findings.append(finding(requirement.name, accepted, found or "not installed", fix))
    return findings


# --- memory and disk --------------------------------------------------------------------------------------------------


MIN_HOST_BYTES = 4 * GIB
"""With less than this, importing the libraries and building a small model hardly works."""

MIN_SHARED_BYTES = 1 * GIB
"""Loader workers pass batches on in /dev/shm; with Docker's default of 64 MiB they end with a bus error."""

MIN_DISK_BYTES = 10 * GIB
MIN_DISK_BYTES_PER_S = 500e6
"""A SATA drive's rate; with less, an optimizer step from disk takes minutes per billion parameters."""

MIN_LOCKED_BYTES = 64 * MIB
"""Two buffers of a gigabyte are common, but with less than this not even asynchronous I/O's queues can be set up."""


def check_memory(host: HostState, total_bytes: int, shared: tuple[int, int] | None) -> list[Finding]:
    """Check RAM, the limit of locked memory, and size and free bytes of /dev/shm, which loader workers need."""
    found = f"{format_bytes(host.available_bytes)} free of {format_bytes(total_bytes)}"
    if host.total_bytes < total_bytes:
        found += f", limited to {format_bytes(host.total_bytes)} by the control group"
    locked = host.memlock_limit_bytes
    size, free = shared or (0, 0)
    return [
        finding(
            "host memory",
            host.available_bytes >= MIN_HOST_BYTES,
            found,
            "end other programs, or raise the container's limit (docker run --memory, Kubernetes "
            "resources.limits.memory)",
        ),
        finding(
            "locked memory",  # which binds asynchronous disk I/O and mlock, but not CUDA's pinned memory
            locked is None or locked >= MIN_LOCKED_BYTES,
            "unlimited" if locked is None else f"limited to {format_bytes(locked)}",
            "to offload to disk: `ulimit -l unlimited`, memlock in /etc/security/limits.conf, docker --ulimit "
            "memlock=-1",
            "note",
        ),
        finding(
            "/dev/shm",
            free >= MIN_SHARED_BYTES,
            f"{format_bytes(free)} free of {format_bytes(size)}" if shared else "not there",
            "start the container with --shm-size=8g or --ipc=host, or set `num_workers: 0`",
            "problem" if shared else "note",
        ),
    ]


def check_direct_io(folder: str, error: str | None) -> Finding:
    """Check whether files can be opened with O_DIRECT, which bypasses the page cache, as offloading to disk does."""
    found = f"works in {folder}" if error is None else f"{error} in {folder}"
    fix = (
        "to offload name a folder on a local ext4 or xfs drive with --folder; network and overlay file systems lack it"
    )
    return finding("O_DIRECT", error is None, found, fix, "note")


# --- this machine -----------------------------------------------------------------------------------------------------


_OWN_HEADERS = Path(sys.prefix) / "include"  # of conda environments


def examine(folder: str = ".") -> dict[str, list[Finding]]:
    """Read this machine and check everything that could hinder training or offloading.

    A file of 256 MiB is written to the folder, where checkpoints and offloaded states would be, and removed.

    Returns:
        Findings by subject.

    Raises:
        ValueError: If the folder can't be written to.
    """
    import torch

    return {
        "GPU": [
            *check_gpu(driver_version(), _nvml_error(), torch.version.cuda, torch.cuda.is_available()),
            check_bitsandbytes(),
        ],
        "building extensions": build_tools(),
        "memory": _memory(),
        "disk": _disk(folder),
        "libraries": check_versions(*_libraries()),
    }


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of the NVIDIA kernel driver; None without one."""
    try:
        words = path.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word.replace(".", "").isdecimal() and "." in word), "of unknown version")


def _nvml_error() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # any error is the finding
        return f"{type(error).__name__}: {error}"
    return None


def build_tools() -> list[Finding]:
    """Check the tools that compile DeepSpeed's kernels when they are first used."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    headers = [folder / "libaio.h" for folder in (Path("/usr/include"), Path("/usr/local/include"), _OWN_HEADERS)]
    aio = next((str(header) for header in headers if header.is_file()), None)
    tools = [
        ("C++ compiler", compiler, "DeepSpeed's and torch.compile's kernels", "apt install g++"),
        ("ninja", shutil.which("ninja"), "DeepSpeed's kernels", "pip install ninja"),
        ("libaio", aio, "offloading to disk with DeepSpeed", "apt install libaio-dev"),
    ]
    return [
        finding(name, path is not None, path or f"not found; needed for {needed_for}", fix, "note")
        for name, path, needed_for, fix in tools
    ]


def _memory() -> list[Finding]:
    import psutil

    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    total = psutil.virtual_memory().total
    return check_memory(probe_host(), total, (shared.total, shared.free) if shared else None)


def _disk(folder: str) -> list[Finding]:
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else 0
    found, fix = f"{format_bytes(free)} free at {folder}", "free some, or name another folder with --folder"
    findings = [finding("disk space", free >= MIN_DISK_BYTES, found, f"{fix}: checkpoints need room")]
    if free >= 2 * 256 * MIB:  # else there is no room for the test file
        speed = measure_storage(folder)
        rates = (speed.write_bytes_per_s, speed.read_bytes_per_s)
        found = "writes {:.2f} GB/s, reads {:.2f} GB/s".format(*(rate / 1e9 for rate in rates))
        fix = "fine for checkpoints; for offloading name a folder on an NVMe drive"
        findings.append(check_direct_io(folder, speed.direct_error))
        findings.append(finding("disk speed", min(rates) >= MIN_DISK_BYTES_PER_S, found, fix, "note"))
    return findings


def _libraries() -> tuple[dict[str, str | None], list[str]]:
    from packaging.requirements import Requirement

    needed = requires("lightning-memfit") or []
    return {name: _version(name) for name in (Requirement(one).name for one in needed)}, needed


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
