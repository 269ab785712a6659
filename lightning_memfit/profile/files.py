"""Files that the user's code reads in a trace: no key from before it knows what they hold. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_memfit.memory.cache_files import default_cache_folder
from lightning_memfit.profile.culprit import owner_of, owner_of_frame, running_frames

_CODE, _OF_SYSTEM = (".py", ".pyc"), ("/proc/", "/sys/", "/dev/")

_reading: list[set[str]] = []
"""What each open `files_read` has found so far."""

_is_deciding = False


@contextmanager
def files_read() -> Iterator[set[str]]:
    """Collect the user's files that processes made meanwhile (`profile.process`) open to read.

    These are files that the user's code opens, or that lie below the working directory. What only native code opens
    isn't seen. Python's code counts by its modules, and what packages bring or keep in caches and hidden folders
    doesn't count.

    Returns:
        A set that gets their absolute paths.
    """
    found = set[str]()
    _reading.append(found)
    try:
        yield found
    finally:
        _reading[:] = [one for one in _reading if one is not found]


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
        if _is_content(path) and (_is_project(path) or _is_opened_by_user()):
            take_read([{path}] * len(_reading))
    except OSError:  # there is no working directory
        return
    finally:
        _is_deciding = False


def _is_content(path: str) -> bool:
    cached = path.startswith(os.path.join(default_cache_folder().absolute(), ""))
    special = path.endswith(_CODE) or path.startswith(_OF_SYSTEM)
    return not (cached or special) and owner_of(path) == "user" and os.path.isfile(path)


def _is_project(path: str) -> bool:
    """Whether a file lies in the working directory, in no hidden folder."""
    inside = path.removeprefix(os.path.join(os.getcwd(), ""))
    return not os.path.isabs(inside) and not any(part.startswith(".") for part in inside.split(os.sep))


def _is_opened_by_user() -> bool:
    """Whether the nearest code that isn't Python's own is the user's."""
    nearest = next((frame for frame in running_frames() if _is_outside(frame)), None)
    return nearest is not None and owner_of_frame(nearest) == "user"


def _is_outside(frame: FrameType) -> bool:
    return frame.f_code.co_filename != __file__ and owner_of_frame(frame) != "standard"


def read_so_far() -> list[set[str]]:
    """What every open `files_read` has found."""
    return _reading


def take_read(found: list[set[str]]) -> None:
    """Take over what another process has found for those that are open here."""
    for own, others in zip(_reading, found, strict=False):
        own |= others
