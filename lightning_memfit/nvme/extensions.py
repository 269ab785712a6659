"""Locks on DeepSpeed's kernels, which torch compiles when they are first needed.

A process that compiles, or only loads, holds a file named `lock`, and the others wait until it is gone. A process that
is killed leaves the file, and all later processes wait forever without a message. `KernelLock` takes the place of
torch's lock in runs of this package: the kernel ends it with its process, so that whoever waits takes over. Written for
torch 2.9 to 2.13 (`torch/utils/file_baton.py`, `cpp_extension._get_build_directory`).
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities.rank_zero import rank_zero_info

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_KERNELS = ("async_io", "pin_memory")
_PATIENCE_SECONDS = 10.0
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class BuildLock:
    """A lock file of torch's own that exists, by a program without this package."""

    path: Path
    holder: int | None
    """Process on this machine that has it open; None if there is none to be seen."""


def build_locks(root: Path | None = None) -> list[BuildLock]:
    """Torch's own locks on the kernels that offloading to disk needs.

    Args:
        root: Folder where extensions are compiled; by default torch's.
    """
    folder = extensions_folder() if root is None else root
    paths = [folder / name / "lock" for name in _KERNELS]
    return [BuildLock(path, _holder(path)) for path in paths if path.exists()]


def compile_kernels() -> None:
    """Compile the kernels that offloading to disk needs, or load them if that was done before.

    Raises:
        RuntimeError: If a process that ended while compiling left torch's own lock, for which torch would wait forever.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    outlive_killed_builds()
    AsyncIOBuilder().load()


def outlive_killed_builds() -> None:
    """Let torch lock kernels by `KernelLock` from now on, in this process."""
    from torch.utils import cpp_extension

    if fcntl is not None:
        cpp_extension.FileBaton = KernelLock  # type: ignore[assignment, attr-defined]


class KernelLock:
    """An advisory lock on a folder of kernels, with the methods of torch's `FileBaton`.

    Torch lets one process compile, and the others import what it has compiled, if it was not killed. Here they compile
    one after the other: ninja finds nothing left to do, or goes on where the one before was killed.

    Args:
        lock_file_path: The file by which torch would lock the folder.
    """

    def __init__(self, lock_file_path: str) -> None:
        self._path = Path(lock_file_path)
        self._file: IO[str] | None = None

    def try_acquire(self) -> bool:
        """Wait for the lock and take it.

        Raises:
            RuntimeError: If torch's own lock is there and no process on this machine has had it for 10 seconds.
        """
        self._file = self._path.with_name("memfit.lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rank_zero_info(f"Waiting for another process, which compiles kernels in {self._path.parent}.")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        end = time.monotonic() + _PATIENCE_SECONDS
        while self._path.exists():
            if _holder(self._path) is not None:
                end = time.monotonic() + _PATIENCE_SECONDS
            elif time.monotonic() > end:
                self.release()
                raise RuntimeError(
                    f"{self._path} was left by a process that ended while it compiled. Remove that file, unless "
                    "another machine is compiling there."
                )
            time.sleep(_PAUSE_SECONDS)
        return True

    def wait(self) -> None:
        """Do nothing: `try_acquire` has waited."""

    def release(self) -> None:
        """Give up the lock."""
        assert self._file is not None
        self._file.close()
        self._file = None


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
