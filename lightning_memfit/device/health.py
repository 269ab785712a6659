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


_NO_GPU = "none needed for the CPU"
_IN_CONTAINER = "in a container start it with `--gpus all`"


def check_gpu(
    driver: str | None, num_cards: int, nvml: str | None, build: str | None, available: bool
) -> list[Finding]:
    """Check driver, NVML and CUDA. A card without a driver is a problem, a machine without a card is not.

    Args:
        driver: Version of the NVIDIA kernel driver.
        num_cards: NVIDIA display controllers on the PCI bus.
        nvml: Error message of NVML's initialisation; None if it worked.
        build: CUDA version torch was built for; None for a CPU build.
        available: `torch.cuda.is_available()`.
    """
    if driver is None:
        install = f"install the NVIDIA driver (Ubuntu: `ubuntu-drivers install`), then reboot; {_IN_CONTAINER}"
        no_driver = Finding("driver", "problem", f"{num_cards} NVIDIA card(s), no driver", install)
        return [
            no_driver if num_cards else Finding("driver", "note", "no NVIDIA card", _NO_GPU),
            finding("NVML", nvml is None, (nvml and "no driver to talk to") or "answers", _NO_GPU, "note"),
            finding("CUDA", available, f"torch built for {build or 'the CPU'}", _NO_GPU, "note"),
        ]
    level, fix = _mend_of_nvml(nvml or "")
    return [
        Finding("driver", "ok", f"NVIDIA {driver}"),
        finding("NVML", nvml is None, nvml or "answers", fix, level),
        finding(
            "CUDA",
            available,
            f"torch built for CUDA {build} under driver {driver}" if build else "a GPU is here, torch is a CPU build",
            f"update the driver to one for this CUDA, check CUDA_VISIBLE_DEVICES, and {_IN_CONTAINER}"
            if build
            else "reinstall torch from the CUDA index: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu128",
        ),
    ]


def _mend_of_nvml(error: str) -> tuple[Level, str]:
    if "mismatch" in error.lower():
        return "problem", "reboot, or reload the kernel module: library and driver differ"
    if error.startswith("ModuleNotFoundError"):
        return "problem", "pip install nvidia-ml-py"
    if "LibraryNotFound" in error:  # CUDA works without it
        return "note", (
            "its library, libnvidia-ml.so, tells how much memory each process uses: in a container set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility, elsewhere install the driver's user-space tools"
        )
    return "problem", "see what `nvidia-smi` says, which asks NVML, too"


def check_bitsandbytes(error: str | None, backend: str, cuda: bool) -> Finding:
    """Check bitsandbytes: 8-bit optimizers need its native library for the device.

    Args:
        error: Why it can't be imported; None if it can.
        backend: Name of the native library; empty if it runs without one.
        cuda: Whether a CUDA device is usable.
    """
    if error is not None:
        return Finding("bitsandbytes", "problem", error, "pip install 'bitsandbytes>=0.50,<0.51'")
    is_ok = bool(backend) and (not cuda or "cuda" in backend)
    fix = (
        "reinstall it for this platform, or set BNB_CUDA_VERSION to a version it ships; `python -m bitsandbytes` says "
        "which"
    )
    wanted = "CUDA" if cuda else "the CPU"
    return finding("bitsandbytes", is_ok, backend if is_ok else f"no library for {wanted} ({backend or 'none'})", fix)


def check_versions(installed: Mapping[str, str | None], requirements: list[str]) -> list[Finding]:
    """Check that the version of every required distribution is in the range that this package was tested with.

    Args:
        installed: Version by distribution; None if it is missing.
        requirements: Requirements as in package metadata; those of extras are left out.
    """
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
    """Check the RAM that this process may use, its limit of locked memory and the shared memory of loader workers.

    Args:
        host: What is free.
        total_bytes: RAM of the machine.
        shared: Size and free bytes of /dev/shm; None if it doesn't exist.
    """
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
    """Check whether files can be opened with O_DIRECT, which bypasses the page cache, as offloading to disk does.

    Args:
        folder: Where it was tried.
        error: The system's error message; None if it worked.
    """
    found = f"works in {folder}" if error is None else f"{error} in {folder}"
    fix = (
        "to offload name a folder on a local ext4 or xfs drive with --folder; network and overlay file systems lack it"
    )
    return finding("O_DIRECT", error is None, found, fix, "note")


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

    available = torch.cuda.is_available()
    return {
        "GPU": [
            *check_gpu(driver_version(), num_nvidia_cards(), _nvml_error(), torch.version.cuda, available),
            check_bitsandbytes(*_bitsandbytes(), available),
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
    found: dict[str, str | None] = {}
    for requirement in needed:
        name = Requirement(requirement).name
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found, needed
