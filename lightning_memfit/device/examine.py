"""`examine`: read this machine and check everything that would hinder training or offloading."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from lightning_memfit.device import capacity
from lightning_memfit.device.health import (
    Finding,
    check_bitsandbytes,
    check_cuda,
    check_driver,
    check_nvml,
    check_tool,
    check_versions,
)
from lightning_memfit.device.storage import measure_storage

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class of display controllers
_OWN_HEADERS = Path(sys.prefix) / "include"  # of conda environments


def examine(folder: str = ".") -> dict[str, list[Finding]]:
    """Check this machine.

    Args:
        folder: Where checkpoints and offloaded states would lie; a file of 256 MiB is written and removed.

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
    except Exception as error:  # whatever it is, it is the finding
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
    """What DeepSpeed's kernels are compiled with when they are first used."""
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

    from lightning_memfit.device.probe import probe_host

    host, total = probe_host(folder), psutil.virtual_memory().total
    limit = host.total_bytes if host.total_bytes < total else None
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return [
        capacity.check_host_memory(total, host.available_bytes, limit),
        capacity.check_locked_memory(host.memlock_limit_bytes),
        capacity.check_shared_memory(shared.total if shared else None, shared.free if shared else 0),
    ]


def _disk(folder: str) -> list[Finding]:
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else 0
    space = capacity.check_disk_space(folder, free)
    if free < 2 * 256 * 2**20:
        return [space]  # no room to try anything
    speed = measure_storage(folder)
    return [
        space,
        capacity.check_direct_io(folder, speed.direct_error),
        capacity.check_disk_speed(speed.write_bytes_per_s, speed.read_bytes_per_s),
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
