"""Files of the user that are read meanwhile (`files_read`), and what they hold (`stamp_of`). Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_memfit.memory.cache_files import default_cache_folder
from lightning_memfit.profile.culprit import owner_of, owner_of_frame, running_frames

_PARSER = "jsonargparse"

_CODE, _OF_SYSTEM = (".py", ".pyc"), ("/proc/", "/sys/", "/dev/")

_reading: list[tuple[str, set[str]]] = []
"""The working directory of each open `files_read`, and the files that were read so far. The parser goes elsewhere."""

_hooked, _is_deciding = False, False


@contextmanager
def files_read(here: bool = True) -> Iterator[set[str]]:
    """Collect the user's files that are opened to be read: by the parser or the user's code, or below this folder.

    Processes that this one makes meanwhile (`profile.process`) bring home what they have read.

    What only native code opens isn't seen. Python's code counts by its modules, and what packages bring or keep in
    caches and hidden folders doesn't count at all.

    Args:
        here: Whether what this process reads counts as well. That can't be ended, and is for commands.

    Returns:
        A set that gets their paths: relative ones if they lie in the working directory.
    """
    global _hooked
    if here and not _hooked:
        sys.addaudithook(note_opened)  # there is no way to take it off
        _hooked = True
    folder, found = "", set[str]()
    with suppress(OSError):  # there may be no working directory
        folder = os.path.join(os.getcwd(), "")
    entry = folder, found
    _reading.append(entry)
    try:
        yield found
    finally:
        _reading[:] = [one for one in _reading if one is not entry]


def note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what an audit event of Python says."""
    global _is_deciding
    if not _reading or event != "open" or _is_deciding:
        return
    name, _, flags = arguments
    if not isinstance(name, (str, bytes)) or not isinstance(flags, int) or flags & (os.O_WRONLY | os.O_RDWR):
        return
    _is_deciding = True  # `owner_of` may read files itself
    try:
        path = os.path.abspath(os.fsdecode(name))
        for folder, found in _reading if _is_content(path) else ():
            shown = path.removeprefix(folder)
            if _is_project(shown) or _is_opened_for_user():
                found.add(shown)
    except OSError:  # there is no working directory
        return
    finally:
        _is_deciding = False


def _is_content(path: str) -> bool:
    cached = path.startswith(os.path.join(default_cache_folder().absolute(), ""))
    special = path.endswith(_CODE) or path.startswith(_OF_SYSTEM)
    return not (cached or special) and owner_of(path) == "user" and os.path.isfile(path)


def _is_project(shown: str) -> bool:
    """Whether a file lies in the working directory, in no hidden folder."""
    return not os.path.isabs(shown) and not any(part.startswith(".") for part in shown.split(os.sep))


def _is_opened_for_user() -> bool:
    """Whether the nearest code that isn't Python's own is the user's, or the parser of configurations."""
    nearest = next((frame for frame in running_frames() if _is_outside(frame)), None)
    if nearest is None:
        return False
    return owner_of_frame(nearest) == "user" or str(nearest.f_globals.get("__name__")).startswith(_PARSER)


def _is_outside(frame: FrameType) -> bool:
    return frame.f_code.co_filename != __file__ and owner_of_frame(frame) != "standard"


def read_so_far() -> list[set[str]]:
    """What every open `files_read` has found."""
    return [found for _, found in _reading]


def take_read(found: list[set[str]]) -> None:
    """Take over what another process has found for those that are open here."""
    for (_, own), others in zip(_reading, found, strict=False):
        own |= others


# --- what files hold --------------------------------------------------------------------------------------------------


def file_digest(path: Path | None) -> str | None:
    """Hash of a file's content; None if there is no such file."""
    try:
        return None if path is None else digest_of([path.read_bytes()])
    except OSError:
        return None


_MAX_ENTRIES = 20_000
"""Files of a folder that are looked at; more would take seconds."""

_MAX_READ = 1 << 20
"""A file with more bytes is known by its size and time, as reading it would take long."""


def stamp_of(name: str) -> str | None:
    """Content of a small file, or size and time of a large one, of all in a folder and below; None if there is none."""
    path = Path(name).expanduser()
    try:
        if not path.is_dir():
            status = path.stat()
            is_small = path.is_file() and status.st_size <= _MAX_READ
            return file_digest(path) if is_small else f"{status.st_size}-{status.st_mtime_ns}"
        entries = sorted(islice(_entries(path), _MAX_ENTRIES))
    except OSError:
        return None
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:24]


def _entries(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield path within the folder, size and time of every file."""
    for inside, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(inside, name)
            status = path.lstat()
            yield str(path.relative_to(folder)), status.st_size, status.st_mtime_ns


def digest_of(contents: Iterable[bytes]) -> str:
    """Short hash of several contents."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:24]
