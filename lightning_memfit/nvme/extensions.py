"""Locks on DeepSpeed's kernels for asynchronous I/O, which torch compiles when they are first needed.

A process that compiles, or only loads, holds a file named `lock`, and the others wait until it is gone. A process that
is killed leaves the file, and all later processes wait forever without a message. Written for torch 2.11 to 2.13
(`torch/utils/file_baton.py`, `cpp_extension._get_build_directory`).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

_KERNELS = ("async_io", "pin_memory")


@dataclass(frozen=True)
class BuildLock:
    """A lock file that exists."""

    path: Path
    holder: int | None
    """Process on this machine that has it open; None if there is none."""


def build_locks(root: Path | None = None) -> list[BuildLock]:
    """Locks on the kernels that offloading to disk needs.

    Args:
        root: Folder where extensions are compiled; by default torch's.
    """
    folder = extensions_folder() if root is None else root
    found = (_look(folder / name / "lock") for name in _KERNELS)
    return [lock for lock in found if lock is not None]


def compile_kernels() -> None:
    """Compile the kernels that offloading to disk needs, or load them if that was done before.

    Raises:
        RuntimeError: If a process that ended while compiling left its lock, for which torch would wait forever.
    """
    for lock in build_locks():
        if lock.holder is None:
            raise RuntimeError(f"{lock.path} was left by a process that ended while it compiled. Remove that file.")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load()


def extensions_folder() -> Path:
    """Folder in which torch compiles extensions for this interpreter."""
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    hip, cuda = torch.version.hip, torch.version.cuda
    device = f"rocm{hip}" if hip is not None else f"cu{cuda}" if cuda is not None else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return Path(get_default_build_root(), f"{python}_{device}".replace(".", ""))


def _look(path: Path) -> BuildLock | None:
    """A lock that is still the same after looking for its holder; loading a kernel also takes one for a moment."""
    if (before := _inode(path)) is None:
        return None
    lock = BuildLock(path, _holder(path))
    return lock if _inode(path) == before else None


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_ctime_ns


def _holder(path: Path) -> int | None:
    """Process that keeps a file open, as far as this user may see."""
    wanted = str(path.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(descriptor) == wanted for descriptor in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # the process has ended or belongs to another user
            continue
    return None


if __name__ == "__main__":
    compile_kernels()
