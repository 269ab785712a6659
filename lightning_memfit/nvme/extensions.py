"""Locks on DeepSpeed's kernels, which torch compiles when they are first needed.

A process that compiles, or only loads, holds a file named `lock`, and the others wait until it is gone. A process that
is killed leaves the file, and all later processes, as well as the ranks that wait already, wait forever without a
message. `KernelLock` takes the place of torch's lock in runs of this package: whoever waits takes over from a process
that was killed. Written for torch 2.9 to 2.13 (`torch/utils/file_baton.py`, `cpp_extension._get_build_directory`).
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info

_KERNELS = ("async_io", "pin_memory")
_MARK = b"lightning-memfit\n"
_PATIENCE_SECONDS = 10.0
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class BuildLock:
    """A lock file that exists."""

    path: Path
    holder: int | None
    """Process on this machine that has it open; None if there is none to be seen."""
    held: bool
    """Whether a process has it, which may be one in another container."""


def build_locks(root: Path | None = None) -> list[BuildLock]:
    """Locks on the kernels that offloading to disk needs, but for those that the next `KernelLock` takes over.

    Args:
        root: Folder where extensions are compiled; by default torch's.
    """
    folder = extensions_folder() if root is None else root
    found = (_look(folder / name / "lock") for name in _KERNELS)
    return [lock for lock in found if lock is not None]


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

    if sys.platform != "win32":
        cpp_extension.FileBaton = KernelLock  # type: ignore[assignment, attr-defined]


class KernelLock:
    """Torch's lock on a folder of kernels, with an advisory lock on the file, which ends with the process.

    Torch lets one process compile, and the others import what it has compiled, if it was not killed. Here they compile
    one after the other: ninja finds nothing left to do, or goes on where the one before was killed.

    Args:
        lock_file_path: The file that all who use the folder look for, with torch's own lock, too.
    """

    def __init__(self, lock_file_path: str) -> None:
        self._path = Path(lock_file_path)
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Wait for the lock and take it.

        Raises:
            RuntimeError: If torch's own lock is there and no process on this machine has had it for 10 seconds.
        """
        waits_since: float | None = time.monotonic()
        abandoned_since: float | None = None
        while not self._acquire():
            lock, now = _look(self._path), time.monotonic()
            if lock is None:
                _is_left(self._path, remove=True)
            elif lock.held:
                abandoned_since = None
                if waits_since is not None and now - waits_since > _PATIENCE_SECONDS:
                    who = "another process" if lock.holder is None else f"process {lock.holder}"
                    rank_zero_info(f"Waiting for {who}, which compiles kernels in {self._path.parent}.")
                    waits_since = None
            elif abandoned_since is None:
                abandoned_since = now
            elif now - abandoned_since > _PATIENCE_SECONDS:
                raise RuntimeError(
                    f"{self._path} was left by a process that ended while it compiled. Remove that file, unless "
                    "another machine is compiling there."
                )
            time.sleep(_PAUSE_SECONDS)
        return True

    def wait(self) -> None:
        """Do nothing: `try_acquire` has waited."""

    def release(self) -> None:
        """Remove the file, then give up the lock on it: in the other order, who waits could remove it as well."""
        assert self._descriptor is not None
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _acquire(self) -> bool:
        try:
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError:
            return False
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.write(self._descriptor, _MARK)
        return True


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
    if (before := _inode(path)) is None or (is_left := _is_left(path)):
        return None
    holder = _holder(path)
    lock = BuildLock(path, holder, holder is not None or is_left is False)
    return lock if _inode(path) == before else None


def _is_left(path: Path, remove: bool = False) -> bool | None:
    """Whether the process that had a `KernelLock` has ended; None for a lock of torch's own.

    Args:
        path: The lock.
        remove: Whether to remove one that was left, while nobody else can take it for one.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # it has gone, or is another user's
        return None
    try:
        if os.read(descriptor, len(_MARK)) != _MARK:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        state = os.fstat(descriptor)
        if remove and _inode(path) == (state.st_ino, state.st_ctime_ns):
            path.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


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
