"""`RunFolder`: a run's own folder inside the user's, locked while the run lives and removed when it ends."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: `parent_problem` refuses every folder there
    fcntl = None  # type: ignore[assignment]

_PREFIX, _LOCK = "memfit-run-", "lock"


@dataclass(frozen=True)
class RunState:
    """A run folder that was found."""

    path: Path
    size_bytes: int
    """Bytes on the drive."""
    is_stale: bool
    """Whether a run of this machine made it, all of whose processes have ended."""


def find_runs(parent: str | Path) -> list[RunState]:
    """Look at every run folder directly in a folder, without changing anything."""
    paths = [path for path in sorted(Path(parent).glob(f"{_PREFIX}*")) if path.is_dir() and not path.is_symlink()]
    return [RunState(path, folder_bytes(path), _is_stale(path)) for path in paths]


def folder_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take on the drive; a live run may be removing some meanwhile."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(at, name)).st_blocks * 512
    return total


def _is_stale(folder: Path) -> bool:
    """Whether it is of this machine and no process holds its lock, as each of the run's does until it ends.

    Where the file system has no locks, nobody can tell, and the run counts as alive.
    """
    if folder.name.removeprefix(_PREFIX).partition("-")[2] != socket.gethostname():  # ids have no hyphen
        return False
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:  # its removal was interrupted: a folder gets this name once its lock is held
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def new_run_id() -> str:
    """A unique name for a run. One rank makes it and tells the others."""
    return uuid.uuid4().hex[:12]


class RunFolder:
    """The folder in which one run keeps its swap files.

    DeepSpeed writes them directly into `nvme_path`, where a second run with the same path silently corrupts the first
    one's training, and leaves them there. Here every run has its own folder. Each of its processes holds a shared lock,
    which the kernel releases however the process ends. A locked folder is never removed, and whatever dead runs of this
    machine left is removed when the next one starts.

    Make one with `create` in one process per machine and with `join` in its other processes.

    Attributes:
        path: The folder, which becomes DeepSpeed's `nvme_path`.
    """

    def __init__(self, path: Path, is_owner: bool, lock: int) -> None:
        self.path = path
        self._is_owner = is_owner
        self._lock: int | None = lock
        self._pid = os.getpid()
        atexit.register(self.close)

    @classmethod
    def create(cls, parent: str | Path, run_id: str) -> RunFolder:
        """Remove what dead runs left and make the folder.

        Args:
            parent: The user's `nvme_path`. It is not created: a mistyped path would end up on another drive.
            run_id: Made by `new_run_id`.

        Raises:
            ValueError: If the parent is not a folder that can be written to and locked.
        """
        path = _path(parent, run_id)
        for state in find_runs(path.parent):
            if state.is_stale:
                shutil.rmtree(state.path, ignore_errors=True)
        unlocked = path.with_name(f".{path.name}")
        unlocked.mkdir()
        try:
            lock = _hold(unlocked)
        except OSError as error:
            shutil.rmtree(unlocked)
            raise ValueError(
                f"`nvme_path` {str(parent)!r} can't be locked ({error.strerror}), which keeps runs from removing each "
                "other's files: name a folder on a local drive."
            ) from error
        unlocked.rename(path)
        return cls(path, True, lock)

    @classmethod
    def join(cls, parent: str | Path, run_id: str) -> RunFolder:
        """Use the folder that another process of this run has made on this machine."""
        path = _path(parent, run_id)
        return cls(path, False, _hold(path))

    def close(self, timeout_s: float = 30.0) -> bool:
        """Release the lock; the owner waits for the run's other processes and removes the folder. Safe to call twice.

        Args:
            timeout_s: How long the owner waits. After that the folder stays; a run that starts when this process has
                ended removes it.

        Returns:
            Whether the folder is gone, or another process is responsible for removing it.
        """
        if self._lock is None or os.getpid() != self._pid:  # a forked worker does not hold it
            return True
        atexit.unregister(self.close)
        lock, self._lock = self._lock, None
        try:
            if not self._is_owner:
                return True
            if not _wait_alone(lock, timeout_s):
                return False
            shutil.rmtree(self.path)
            return True
        finally:
            os.close(lock)


def parent_problem(parent: str | Path) -> tuple[str, str] | None:
    """What is wrong with the user's folder, and the fix: missing, not a folder, or not writable."""
    path, another = Path(parent), "name a folder on a local NVMe drive"
    if fcntl is None:
        return f"{str(parent)!r} can't be locked: this system has no file locks of POSIX", "train from disk on Linux"
    if not path.exists():
        return f"{str(parent)!r} does not exist", f"make the folder, or {another}"
    if not path.is_dir():
        return f"{str(parent)!r} is not a folder", another
    if os.statvfs(path).f_flag & os.ST_RDONLY or not os.access(path, os.W_OK | os.X_OK):
        return f"{str(parent)!r} can't be written to", f"mount it writable, change its rights, or {another}"
    return None


def _path(parent: str | Path, run_id: str) -> Path:
    """The folder of a run, named differently on each machine, so that machines can share a file system."""
    problem = parent_problem(parent)
    if problem is not None:
        raise ValueError("`nvme_path` {}: {}.".format(*problem))
    return Path(parent).resolve() / f"{_PREFIX}{run_id}-{socket.gethostname()}"


def _hold(path: Path) -> int:
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        os.close(lock)
        raise
    return lock


def _wait_alone(lock: int, timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
