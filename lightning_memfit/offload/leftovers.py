"""Folders that dead runs left behind: found, judged, and removed file by file."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_memfit.offload.owner import OWNER_FILE, Owner

LOCK_FILE = "lock"
FOLDER_PREFIX = "memfit-run-"

# What DeepSpeed 0.19 writes: zero_stage_3/{optimizer,bfloat16params}/rank0/*.tensor.swp
_SWAP_FOLDER = re.compile(r"zero_stage_3(/(optimizer|(float32|bfloat16|float16)params)(/rank\d+)?)?")
_SWAP_FILE = re.compile(r"zero_stage_3/\w+/rank\d+/[^/]+\.tensor\.swp")
_OWN_FILES = {OWNER_FILE, f"{OWNER_FILE}.partial", LOCK_FILE}


@dataclass(frozen=True)
class RunState:
    """A run folder that was found, and whether it may be removed."""

    path: Path
    owner: Owner
    size_bytes: int
    """On the drive."""
    kept_because: str
    """Why it must stay; empty for what a dead run left."""

    @property
    def is_leftover(self) -> bool:
        """Whether nobody uses it and everything in it is known."""
        return not self.kept_because


def find_runs(parent: str | Path) -> list[RunState]:
    """Look at every run folder directly in a folder. Changes nothing.

    A folder without an owner file of ours is no run folder, whatever its name.
    """
    states = []
    for path in sorted(Path(parent).glob(f"{FOLDER_PREFIX}*")):
        owner = None if path.is_symlink() or not path.is_dir() else Owner.read(path)
        if owner is not None and path.name == folder_name(owner.host, owner.run_id):
            states.append(RunState(path, owner, folder_bytes(path), _reason_to_keep(path, owner)))
    return states


def remove_leftovers(parent: str | Path) -> list[RunState]:
    """Remove what dead runs on this machine left. Callers hold the parent's lock, so that no run is just starting.

    Returns:
        What was removed.
    """
    removed = []
    for state in find_runs(parent):
        if state.is_leftover:
            remove_run(state.path)
            removed.append(state)
    return removed


def remove_run(folder: Path) -> None:
    """Remove a run folder file by file; the owner file goes last, so that an interrupted removal can be taken up again.

    Raises:
        OSError: If there is anything that no run writes: that stays, with the folder around it.
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
    """The first entry that no run writes, as a path within the folder; symbolic links always are."""
    for path in _walk(folder):
        inside = path.relative_to(folder).as_posix()
        if path.is_symlink():
            return inside
        known = _SWAP_FOLDER.fullmatch(inside) if path.is_dir() else _SWAP_FILE.fullmatch(inside)
        if not known and inside not in _OWN_FILES:
            return inside
    return None


def folder_name(host: str, run_id: str) -> str:
    """Name of a run's folder; of each machine its own, so that machines can share a file system."""
    return f"{FOLDER_PREFIX}{run_id}-{host}"


def is_locked(folder: Path) -> bool:
    """Whether any process of the run lives: each holds the lock until it ends, however it ends."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _reason_to_keep(path: Path, owner: Owner) -> str:
    if not owner.is_here:
        return f"it is of {owner}, and only that machine can tell whether it still runs"
    if owner.is_running or is_locked(path):
        return f"{owner} still runs"
    foreign = first_foreign(path)
    return f"it holds {foreign}, which no run wrote" if foreign is not None else ""


def _walk(folder: Path) -> Iterator[Path]:
    """Every entry below a folder, folders before what is in them; links are not followed.

    A living run may be removing its files meanwhile: a folder that vanishes is empty.
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
