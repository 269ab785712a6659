"""`RunFolder`: a folder of a run's own under the user's, locked while the run lives and removed when it ends."""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from lightning_memfit.offload.leftovers import (
    LOCK_FILE,
    RunState,
    find_runs,
    folder_bytes,
    folder_name,
    is_locked,
    remove_leftovers,
    remove_run,
)
from lightning_memfit.offload.owner import Owner

_RUN_ID = re.compile(r"[0-9a-z]{4,40}")


def new_run_id() -> str:
    """A name no other run has. One rank makes it and tells the others."""
    return uuid.uuid4().hex[:12]


class RunFolder:
    """Where one run keeps its swap files.

    DeepSpeed puts them straight into `nvme_path`, where a second run with the same path corrupts the first one's
    training silently, and leaves them there. Here every run has a folder of its own. Each of its processes holds a
    shared lock, which the kernel gives up when the process ends in whatever way; what is locked is never removed, and
    what dead runs of this machine left is removed when the next one starts.

    Make one with `create` in one process per machine and with `join` in its other processes.

    Attributes:
        path: The folder, DeepSpeed's `nvme_path`.
        run_id: Shared by all processes of the run.
        is_owner: Whether this process made the folder and removes it.
        reaped: What dead runs had left and was removed.
    """

    def __init__(self, path: Path, run_id: str, is_owner: bool, lock: int, reaped: list[RunState]) -> None:
        self.path = path
        self.run_id = run_id
        self.is_owner = is_owner
        self.reaped = reaped
        self._lock: int | None = lock
        self._pid = os.getpid()
        atexit.register(self.close)

    @classmethod
    def create(cls, parent: str | Path, run_id: str) -> RunFolder:
        """Remove dead runs' leftovers and make the folder.

        Args:
            parent: The user's `nvme_path`. It is not made: a mistyped path would end on another drive.
            run_id: Of `new_run_id`.

        Raises:
            ValueError: If the parent is no folder, can't be written to, or is itself within a run's folder.
            RuntimeError: If a run of this id lives.
        """
        parent = check_parent(parent)
        path = parent / _name(run_id)
        with _locked(parent):
            reaped = remove_leftovers(parent)
            living = next((state for state in find_runs(parent) if state.path == path), None)
            if living is not None:
                raise RuntimeError(f"{path} can't be used: {living.kept_because}. End that run or take another run id.")
            try:
                path.mkdir()
            except FileExistsError as error:
                raise RuntimeError(f"{path} is there, but no run made it. Move it away.") from error
            lock = _hold(path)
            Owner.this_process(run_id).write(path)
        return cls(path, run_id, True, lock, reaped)

    @classmethod
    def join(cls, parent: str | Path, run_id: str) -> RunFolder:
        """Use the folder that another process of this run made on this machine.

        Raises:
            ValueError: If the parent is no folder.
            RuntimeError: If there is no such folder, or its owner has ended.
        """
        parent = check_parent(parent)
        path = parent / _name(run_id)
        with _locked(parent):
            owner = Owner.read(path)
            if owner is None or not owner.is_running:
                raise RuntimeError(f"No living process has made {path}: one process per machine must create it first.")
            lock = _hold(path)
        return cls(path, run_id, False, lock, [])

    @property
    def used_bytes(self) -> int:
        """Bytes of the run's swap files on this machine, now."""
        return folder_bytes(self.path)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Give up the lock; the owner waits for the run's other processes and removes the folder. Safe to call twice.

        Args:
            timeout_s: How long the owner waits. After that the folder stays; a run that starts when this process has
                ended removes it.

        Returns:
            Whether the folder is gone, or was another process's to remove.

        Raises:
            OSError: If somebody else put a file there; it stays.
        """
        if self._lock is None or os.getpid() != self._pid:  # a forked worker has no part in it
            return True
        atexit.unregister(self.close)
        lock, self._lock = self._lock, None
        try:
            if not self.is_owner:
                return True
            if not _wait_alone(lock, timeout_s):
                return False
            remove_run(self.path)
            return True
        finally:
            os.close(lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def check_parent(parent: str | Path) -> Path:
    """The user's folder as an absolute path.

    Raises:
        ValueError: If `parent_problem` finds one.
    """
    problem = parent_problem(parent)
    if problem is not None:
        found, fix = problem
        raise ValueError(f"`nvme_path` {found}: {fix}.")
    return Path(parent).resolve()


def parent_problem(parent: str | Path) -> tuple[str, str] | None:
    """What is wrong with the user's folder, and the fix: missing, no folder, read-only, or within a run's folder."""
    path = Path(parent)
    another = "or name another folder on a local NVMe drive"
    if not path.exists():
        return f"{str(parent)!r} does not exist", f"make the folder, {another}"
    if not path.is_dir():
        return f"{str(parent)!r} is not a folder", f"name a folder, {another}"
    path = path.resolve()
    inside = next((folder for folder in (path, *path.parents) if Owner.read(folder) is not None), None)
    if inside is not None:
        owner = Owner.read(inside)
        state = "that still runs" if is_locked(inside) else "that has ended"
        return f"{str(parent)!r} is within the folder of a run ({owner}) {state}", f"name {inside.parent} instead"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return f"{str(parent)!r} is on a file system mounted read-only", f"mount it writable, {another}"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"{str(parent)!r} may not be written to by this user", f"change its rights, {another}"
    return None


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Hold the lock of a folder itself, for the moment that runs start or are removed."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise ValueError(
                f"`nvme_path` {str(parent)!r} can't be locked ({error.strerror}): name a folder on a local drive."
            ) from error
        yield
    finally:
        os.close(descriptor)


def _name(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"`run_id={run_id!r}` must be 4 to 40 digits and lower-case letters.")
    return folder_name(socket.gethostname(), run_id)


def _hold(path: Path) -> int:
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
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
