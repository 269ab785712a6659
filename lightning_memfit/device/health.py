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

    def __post_init__(self) -> None:
        if (self.level == "ok") == bool(self.fix):
            raise ValueError(
                f"`fix={self.fix!r}` of {self.name}: say one for a note or problem, none where all is well."
            )


def hinders(findings: list[Finding]) -> bool:
    """Whether any finding is a problem."""
    return any(finding.level == "problem" for finding in findings)


def check_driver(driver: str | None, num_cards: int) -> Finding:
    """Check the NVIDIA driver: a card without a driver is a problem, a machine without a card is not.

    Args:
        driver: Version of the NVIDIA kernel driver.
        num_cards: NVIDIA display controllers on the PCI bus.
    """
    if driver is not None:
        return Finding("driver", "ok", f"NVIDIA {driver}")
    if num_cards:
        return Finding(
            "driver",
            "problem",
            f"{num_cards} NVIDIA card(s), no driver",
            "install the NVIDIA driver (Ubuntu: `ubuntu-drivers install`), then reboot; in a container start it with "
            "`--gpus all`",
        )
    return Finding("driver", "note", "no NVIDIA card", "none needed for the CPU")


def check_nvml(error: str | None, driver: str | None) -> Finding:
    """Check NVML, which reports memory use by process.

    Args:
        error: Error message of its initialisation; None if it worked.
        driver: Version of the kernel driver.
    """
    if error is None:
        return Finding("NVML", "ok", "answers")
    if driver is None:
        return Finding("NVML", "note", "no driver to talk to", "none needed for the CPU")
    level: Level = "problem"
    if "mismatch" in error.lower():
        fix = "reboot, or reload the kernel module: library and driver differ"
    elif error.startswith("ModuleNotFoundError"):
        fix = "pip install nvidia-ml-py"
    elif "LibraryNotFound" in error:  # CUDA works without it
        level = "note"
        fix = (
            "its library, libnvidia-ml.so, tells how much memory each process uses: in a container set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility, elsewhere install the driver's user-space tools"
        )
    else:
        fix = "see what `nvidia-smi` says, which asks NVML, too"
    return Finding("NVML", level, error, fix)


def check_cuda(build: str | None, available: bool, driver: str | None) -> Finding:
    """Check that torch is built for the card that is here, and sees it.

    Args:
        build: CUDA version torch was built for; None for a CPU build.
        available: `torch.cuda.is_available()`.
        driver: Version of the kernel driver.
    """
    if available:
        return Finding("CUDA", "ok", f"runtime {build}, a device is usable")
    if driver is None:
        return Finding("CUDA", "note", f"torch built for {build or 'the CPU'}, no GPU", "none needed for the CPU")
    if build is None:
        return Finding(
            "CUDA",
            "problem",
            "a GPU is here, but torch is a CPU build",
            "reinstall torch from the CUDA index: pip install torch --index-url https://download.pytorch.org/whl/cu128",
        )
    return Finding(
        "CUDA",
        "problem",
        f"torch for CUDA {build} sees no device under driver {driver}",
        "update the driver to one for this CUDA, check CUDA_VISIBLE_DEVICES, and in a container start it with "
        "`--gpus all`",
    )


def check_bitsandbytes(error: str | None, backend: str, cuda: bool) -> Finding:
    """Check bitsandbytes: 8-bit optimizers need its native library for the device.

    Args:
        error: Why it can't be imported; None if it can.
        backend: Name of the native library; empty if it runs without one.
        cuda: Whether a CUDA device is usable.
    """
    if error is not None:
        return Finding("bitsandbytes", "problem", error, "pip install 'bitsandbytes>=0.50,<0.51'")
    if backend and (not cuda or "cuda" in backend):
        return Finding("bitsandbytes", "ok", backend)
    wanted = "CUDA" if cuda else "CPU"
    return Finding(
        "bitsandbytes",
        "problem",
        f"no native library for {wanted} (found {backend or 'none'})",
        "reinstall it for this platform, or set BNB_CUDA_VERSION to a version it ships; `python -m bitsandbytes` says "
        "which",
    )


def check_tool(name: str, path: str | None, needed_for: str, fix: str) -> Finding:
    """Check for a program or library that only some features need.

    Args:
        name: Name of the tool.
        path: Where it is; None if it is missing.
        needed_for: Features that need it.
        fix: How to get it.
    """
    if path:
        return Finding(name, "ok", path)
    return Finding(name, "note", f"not found; needed for {needed_for}", fix)


def check_version(name: str, installed: str | None, wanted: str, accepted: bool) -> Finding:
    """Check that the version of a library is in the range that this package was tested with.

    Args:
        name: Name of the distribution.
        installed: Its version; None if it is missing.
        wanted: The range.
        accepted: Whether the version is in the range.
    """
    if installed is not None and accepted:
        return Finding(name, "ok", installed)
    return Finding(name, "problem", installed or "not installed", f"pip install '{name}{wanted}'")


def check_versions(installed: Mapping[str, str | None], requirements: list[str]) -> list[Finding]:
    """Check every required distribution.

    Args:
        installed: Version by distribution; None if it is missing.
        requirements: Requirements as in package metadata; those of extras are left out.
    """
    from packaging.requirements import Requirement

    findings = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(requirement.name)
        accepted = version is not None and requirement.specifier.contains(version, prereleases=True)
        findings.append(check_version(requirement.name, version, str(requirement.specifier), accepted))
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


def check_host_memory(total_bytes: int, available_bytes: int, cgroup_bytes: int | None) -> Finding:
    """Check the RAM that this process may use.

    Args:
        total_bytes: RAM of the machine.
        available_bytes: RAM that can be taken without swapping, cgroup limits considered.
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
    """Check the limit of locked memory (`ulimit -l`), which binds asynchronous disk I/O and mlock.

    CUDA's pinned memory is not bound by it.

    Args:
        limit_bytes: The limit; None if there is none.
    """
    if limit_bytes is None:
        return Finding("locked memory", "ok", "unlimited")
    found = f"limited to {format_bytes(limit_bytes)}"
    if limit_bytes >= MIN_LOCKED_BYTES:
        return Finding("locked memory", "ok", found)
    fix = "to offload to disk: `ulimit -l unlimited`, memlock in /etc/security/limits.conf, docker --ulimit memlock=-1"
    return Finding("locked memory", "note", found, fix)


def check_shared_memory(total_bytes: int | None, free_bytes: int) -> Finding:
    """Check the shared memory that loader workers need.

    Args:
        total_bytes: Size of /dev/shm; None if it doesn't exist.
        free_bytes: Free bytes of it.
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
    """Check that there is room for checkpoints and offloaded states."""
    found = f"{format_bytes(free_bytes)} free at {folder}"
    if free_bytes >= MIN_DISK_BYTES:
        return Finding("disk space", "ok", found)
    return Finding(
        "disk space", "problem", found, "free some, or name another folder with --folder: checkpoints need room"
    )


def check_direct_io(folder: str, error: str | None) -> Finding:
    """Check whether files can be opened with O_DIRECT, which bypasses the page cache, as offloading to disk does.

    Args:
        folder: Where it was tried.
        error: The system's error message; None if it worked.
    """
    if error is None:
        return Finding("O_DIRECT", "ok", f"works in {folder}")
    fix = (
        "to offload name a folder on a local ext4 or xfs drive with --folder; network and overlay file systems lack it"
    )
    return Finding("O_DIRECT", "note", f"{error} in {folder}", fix)


def check_disk_speed(write_bytes_per_s: float, read_bytes_per_s: float) -> Finding:
    """Check the sequential speed of a drive, which bounds offloading to disk."""
    found = f"writes {write_bytes_per_s / 1e9:.2f} GB/s, reads {read_bytes_per_s / 1e9:.2f} GB/s"
    if min(write_bytes_per_s, read_bytes_per_s) >= MIN_DISK_BYTES_PER_S:
        return Finding("disk speed", "ok", found)
    return Finding("disk speed", "note", found, "fine for checkpoints; for offloading name a folder on an NVMe drive")


# --- this machine -----------------------------------------------------------------------------------------------------


_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class of display controllers
_OWN_HEADERS = Path(sys.prefix) / "include"  # of conda environments


def examine(folder: str = ".") -> dict[str, list[Finding]]:
    """Read this machine and check everything that could hinder training or offloading.

    Args:
        folder: Where checkpoints and offloaded states would be stored; a file of 256 MiB is written and removed.

    Returns:
        Findings by subject.

    Raises:
        ValueError: If the folder can't be written to.
    """
    import torch

    driver, available = driver_version(), torch.cuda.is_available()
    bnb_error, backend = _bitsandbytes()
    return {
        "GPU": [
            check_driver(driver, num_nvidia_cards()),
            check_nvml(_nvml_error(), driver),
            check_cuda(torch.version.cuda, available, driver),
            check_bitsandbytes(bnb_error, backend, available),
        ],
        "building extensions": build_tools(),
        "memory": _memory(folder),
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


def num_nvidia_cards(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA display controllers on the PCI bus; 0 where the bus can't be read."""
    count = 0
    for folder in devices.glob("*"):
        try:
            vendor, kind = (folder / "vendor").read_text().strip(), (folder / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return count


def _nvml_error() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # any error is the finding
        return f"{type(error).__name__}: {error}"
    return None


def _bitsandbytes() -> tuple[str | None, str]:
    try:
        import bitsandbytes.cextension as extension
    except Exception as error:
        return f"{type(error).__name__}: {error}", ""
    library = getattr(extension, "lib", None)
    native = getattr(library, "_lib", None)
    return None, Path(native._name).name if native is not None else ""


def build_tools() -> list[Finding]:
    """Check the tools that compile DeepSpeed's kernels when they are first used."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    jit = "DeepSpeed's and torch.compile's kernels"
    headers = [folder / "libaio.h" for folder in (Path("/usr/include"), Path("/usr/local/include"), _OWN_HEADERS)]
    aio = next((str(header) for header in headers if header.is_file()), None)
    return [
        check_tool("C++ compiler", compiler, jit, "apt install g++"),
        check_tool("ninja", shutil.which("ninja"), "DeepSpeed's kernels", "pip install ninja"),
        check_tool("libaio", aio, "offloading to disk with DeepSpeed", "apt install libaio-dev"),
    ]


def _memory(folder: str) -> list[Finding]:
    import psutil

    from lightning_memfit.device.host import probe_host

    host, total = probe_host(folder), psutil.virtual_memory().total
    limit = host.total_bytes if host.total_bytes < total else None
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return [
        check_host_memory(total, host.available_bytes, limit),
        check_locked_memory(host.memlock_limit_bytes),
        check_shared_memory(shared.total if shared else None, shared.free if shared else 0),
    ]


def _disk(folder: str) -> list[Finding]:
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else 0
    space = check_disk_space(folder, free)
    if free < 2 * 256 * 2**20:
        return [space]  # no room for the test file
    speed = measure_storage(folder)
    return [
        space,
        check_direct_io(folder, speed.direct_error),
        check_disk_speed(speed.write_bytes_per_s, speed.read_bytes_per_s),
    ]


def _libraries() -> tuple[dict[str, str | None], list[str]]:
    from packaging.requirements import Requirement

    needed = requires("lightning-memfit") or []
    found: dict[str, str | None] = {}
    for requirement in needed:
        name = Requirement(requirement).name
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found, needed
