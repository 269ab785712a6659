"""Where and from what a result comes: versions, hardware, commit. Reads no torch, so that it costs nothing."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "accelerate", "deepspeed", "torchao")


def versions() -> dict[str, str]:
    """Versions of what decides a result; what is not installed is left out."""
    import lightning_memfit

    found = {"python": platform.python_version(), "lightning_memfit": lightning_memfit.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(notes: str) -> dict[str, Any]:
    """Cores, host memory and load of this machine; who measured adds the device."""
    import psutil

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "notes": notes,
    }


def commit() -> str:
    """Commit of the checkout that the package is run from, `-dirty` with changes; empty outside of one."""
    from pathlib import Path

    import lightning_memfit

    root = Path(lightning_memfit.__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        try:
            run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return run.stdout.strip()

    name = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no", "--", "lightning_memfit", "cli", "recipes")
    return f"{name}-dirty" if name and changes else name
