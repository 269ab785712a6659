"""`KernelLock`: a lock on DeepSpeed's kernels, which torch compiles when they are first needed.

A process that compiles, or only loads, holds a file named `lock`, and the others wait until it is gone. A process that
is killed leaves the file, and all later processes wait forever without a message. `KernelLock` takes the place of
torch's lock in runs of this package: the kernel ends it with its process, so that whoever waits takes over, and a file
that was left is not looked at. Written for torch 2.9 to 2.13 (`torch/utils/file_baton.py`).
"""

from pathlib import Path
from typing import IO

from lightning.pytorch.utilities.rank_zero import rank_zero_info

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def compile_kernels() -> None:
    """Compile the kernels that offloading to disk needs, or load them if that was done before."""
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
        """Wait for the lock and take it."""
        self._file = self._path.with_name("memfit.lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rank_zero_info(f"Waiting for another process, which compiles kernels in {self._path.parent}.")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def wait(self) -> None:
        """Do nothing: `try_acquire` has waited."""

    def release(self) -> None:
        """Give up the lock."""
        assert self._file is not None
        self._file.close()
        self._file = None


if __name__ == "__main__":
    compile_kernels()
