"""`RunFolder`: a run's own folder inside the user's, locked while the run lives and removed when it ends.

`find_runs` and `remove_stale_runs` find and judge what dead runs left behind, and remove it file by file.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import override

try:
    import fcntl
except ImportError:  # Windows: `parent_problem` refuses every folder there
    fcntl = None  # type: ignore[assignment]

OWNER_FILE = "owner.json"
_FORMAT = 2


@dataclass(frozen=True)
class Owner:
    """The process that made a run's folder, for messages; whether the run is alive, the folder's lock tells."""

    run_id: str
    host: str
    pid: int
    format: int = _FORMAT

    @classmethod
    def read(cls, folder: Path) -> Owner | None:
        """Read a folder's owner file; None if there is none that this version wrote."""
        try:
            owner = cls(**json.loads((folder / OWNER_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return owner if owner.format == _FORMAT else None

    def write(self, folder: Path) -> None:
        """Write the owner file; a crash leaves either all of it or nothing."""
        partial = folder / f"{OWNER_FILE}.partial"
        partial.write_text(json.dumps(asdict(self)) + "\n")
        partial.rename(folder / OWNER_FILE)

    @override
    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


# --- stale runs -----------------------------------------------------------------------------------------------------


LOCK_FILE = "lock"
FOLDER_PREFIX = "memfit-run-"

# DeepSpeed 0.19 writes zero_stage_3/{optimizer,bfloat16params}/rank0/*.tensor.swp
_SWAP_FOLDER = re.compile(r"zero_stage_3(/(optimizer|(float32|bfloat16|float16)params)(/rank\d+)?)?")
_SWAP_FILE = re.compile(r"zero_stage_3/\w+/rank\d+/[^/]+\.tensor\.swp")
_OWN_FILES = {OWNER_FILE, f"{OWNER_FILE}.partial", LOCK_FILE}


@dataclass(frozen=True)
class RunState:
    """A run folder that was found, and whether it may be removed."""

    path: Path
    owner: Owner
    size_bytes: int
    """Bytes on the drive."""
    kept_because: str
    """Why it must stay; empty for what a dead run left."""

    @property
    def is_stale(self) -> bool:
        """Whether nobody uses it and everything in it is known."""
        return not self.kept_because


def find_runs(parent: str | Path) -> list[RunState]:
    """Look at every run folder directly in a folder, without changing anything.

    A folder without one of our owner files is not a run folder, whatever its name.
    """
    states = []
    for path in sorted(Path(parent).glob(f"{FOLDER_PREFIX}*")):
        owner = None if path.is_symlink() or not path.is_dir() else Owner.read(path)
        if owner is not None and path.name == folder_name(owner.host, owner.run_id):
            states.append(RunState(path, owner, folder_bytes(path), _reason_to_keep(path, owner)))
    return states


def remove_stale_runs(parent: str | Path) -> list[RunState]:
    """Remove what dead runs on this machine left. Callers hold the parent's lock, so that no run is starting.

    Returns:
        The runs that were removed.
    """
    removed = []
    for state in find_runs(parent):
        if state.is_stale:
            remove_run(state.path)
            removed.append(state)
    return removed


def remove_run(folder: Path) -> None:
    """Remove a run folder file by file, the owner file last, so that an interrupted removal can continue later.

    Raises:
        OSError: If it contains anything that no run writes; that stays, with the folder around it.
    """
    foreign = first_foreign(folder)
    if foreign is not None:
        raise OSError(f"{folder} holds {foreign}, which no run wrote. Move it away, then remove the folder.")
    folders = []
    for path in _walk(folder):
        if path.is_dir():
            folders.append(path)
        elif path.name != OWNER_FILE:
            path.unlink()
    for path in reversed(folders):
        path.rmdir()
    (folder / OWNER_FILE).unlink()
    folder.rmdir()


def first_foreign(folder: Path) -> str | None:
    """The first entry that no run writes, as a path within the folder; symbolic links always count as such."""
    for path in _walk(folder):
        inside = path.relative_to(folder).as_posix()
        if path.is_symlink():
            return inside
        known = _SWAP_FOLDER.fullmatch(inside) if path.is_dir() else _SWAP_FILE.fullmatch(inside)
        if not known and inside not in _OWN_FILES:
            return inside
    return None


def folder_name(host: str, run_id: str) -> str:
    """Name of a run's folder, different on each machine, so that machines can share a file system."""
    return f"{FOLDER_PREFIX}{run_id}-{host}"


def is_locked(folder: Path) -> bool:
    """Whether any process of the run is alive: each holds the lock until it ends, in whatever way.

    Where the file system has no locks, nobody can tell, and it counts as alive.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _reason_to_keep(path: Path, owner: Owner) -> str:
    if owner.host != socket.gethostname():
        return f"it is of {owner}, and only that machine can tell whether it still runs"
    if is_locked(path):
        return f"{owner} still runs"
    foreign = first_foreign(path)
    return f"it holds {foreign}, which no run wrote" if foreign is not None else ""


def _walk(folder: Path) -> Iterator[Path]:
    """Every entry below a folder, folders before their contents; links are not followed.

    A live run may be removing its files meanwhile: a folder that vanishes counts as empty.
    """
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    for path in entries:
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def folder_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take on the drive."""
    total = 0
    for path in _walk(folder):
        with suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


# --- the run's own folder ---------------------------------------------------------------------------------------------


_RUN_ID = re.compile(r"[0-9a-z]{4,40}")


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
        run_id: Shared by all processes of the run.
        is_owner: Whether this process made the folder and removes it.
        removed: Folders of dead runs that were removed.
    """

    def __init__(self, path: Path, run_id: str, is_owner: bool, lock: int, removed: list[RunState]) -> None:
        self.path = path
        self.run_id = run_id
        self.is_owner = is_owner
        self.removed = removed
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
            ValueError: If the parent is not a folder, can't be written to, or is itself inside a run's folder.
            RuntimeError: If a run of this id is alive.
        """
        parent = check_parent(parent)
        path = parent / _name(run_id)
        with _locked(parent):
            removed = remove_stale_runs(parent)
            living = next((state for state in find_runs(parent) if state.path == path), None)
            if living is not None:
                raise RuntimeError(f"{path} can't be used: {living.kept_because}. End that run or take another run id.")
            try:
                path.mkdir()
            except FileExistsError as error:
                raise RuntimeError(f"{path} is there, but no run made it. Move it away.") from error
            lock = _hold(path)
            Owner(run_id, socket.gethostname(), os.getpid()).write(path)
        return cls(path, run_id, True, lock, removed)

    @classmethod
    def join(cls, parent: str | Path, run_id: str) -> RunFolder:
        """Use the folder that another process of this run made on this machine.

        Raises:
            ValueError: If the parent is not a folder.
            RuntimeError: If there is no such folder, or its owner has ended.
        """
        parent = check_parent(parent)
        path = parent / _name(run_id)
        with _locked(parent):
            if Owner.read(path) is None or not is_locked(path):
                raise RuntimeError(f"No living process has made {path}: one process per machine must create it first.")
            lock = _hold(path)
        return cls(path, run_id, False, lock, [])

    @property
    def used_bytes(self) -> int:
        """Current bytes of the run's swap files on this machine."""
        return folder_bytes(self.path)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Release the lock; the owner waits for the run's other processes and removes the folder. Safe to call twice.

        Args:
            timeout_s: How long the owner waits. After that the folder stays; a run that starts when this process has
                ended removes it.

        Returns:
            Whether the folder is gone, or another process is responsible for removing it.

        Raises:
            OSError: If somebody else put a file there; it stays.
        """
        if self._lock is None or os.getpid() != self._pid:  # a forked worker does not hold it
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
    """What is wrong with the user's folder, and the fix: missing, not a folder, read-only, or inside a run's folder."""
    path = Path(parent)
    another = "or name another folder on a local NVMe drive"
    if fcntl is None:
        return f"{str(parent)!r} can't be locked: this system has no file locks of POSIX", "train from disk on Linux"
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
    """Hold the lock of a folder itself while runs start or are removed."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise ValueError(
                f"`nvme_path` {str(parent)!r} can't be locked ({error.strerror}), which keeps runs from removing each "
                "other's files: name a folder on a local drive."
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
