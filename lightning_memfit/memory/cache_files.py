"""Files of the cache folder: never the reason why a run stops, and believed only if they are what was written.

Every entry carries a checksum, which tells damage and changes by hand. It is no signature: what keeps others from
writing entries is that a folder in which they can is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

_CHECKSUM = "sha256"


def default_cache_folder() -> Path:
    """`$MEMFIT_CACHE`, else `$XDG_CACHE_HOME/lightning-memfit`, else `~/.cache/lightning-memfit`."""
    named = os.environ.get("MEMFIT_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-memfit"


def checksum(content: Any) -> str:
    """Return the checksum of plain values, or of bytes."""
    data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return plain values with their checksum beside them."""
    return {**content, _CHECKSUM: checksum(content)}


def opened(content: Any) -> dict[str, Any]:
    """Return what `sealed` was given.

    Raises:
        ValueError: If it isn't what was written.
    """
    if not isinstance(content, dict) or _CHECKSUM not in content:
        raise ValueError("it has no checksum")
    inside = {name: value for name, value in content.items() if name != _CHECKSUM}
    if content[_CHECKSUM] != checksum(inside):
        raise ValueError("it was changed after it was written, or is damaged")
    return inside


def read_entry(path: Path) -> dict[str, Any] | None:
    """Return the plain values of an entry; None if there is none that can be believed, which is said once.

    Args:
        path: The entry's file, written by `write_entry`.
    """
    try:
        if not path.is_file() or not is_own(path.parent):
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        tell_once(path.parent, f"{path.name} can't be read: {error}")
        return None
    try:
        return opened(json.loads(text))
    except (ValueError, RecursionError) as error:
        tell_once(path.parent, f"{path.name} is not used: {error}")
        return None


def write_entry(path: Path, content: dict[str, Any]) -> bool:
    """Write plain values in place of an older entry; return whether that worked. If not, it is said once.

    Args:
        path: The entry's file.
        content: Plain values.
    """
    text = json.dumps(sealed(content), indent=1) + "\n"
    return write_file(path, lambda file: file.write(text.encode()))


def write_file(path: Path, write: Callable[[BinaryIO], Any]) -> bool:
    """Let a function write a file of the cache, which takes the place of an older one only when it is whole.

    Args:
        path: The file.
        write: Writes it.

    Returns:
        Whether it was written. If not, that is said once for each folder, and nothing is left of it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not is_own(path.parent):
            return False
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".partial")
        try:
            with open(handle, "wb") as file:
                write(file)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        tell_once(path.parent, f"entries can't be written: {error}")
        return False
    return True


def is_own(folder: Path) -> bool:
    """Whether nobody else can have written into a folder: it belongs to this user or root.

    Neither others nor a group may write there, but for the user's own.

    A folder that isn't is said once.
    """
    status = folder.stat()
    if hasattr(os, "geteuid") and os.geteuid() not in (0, status.st_uid) and status.st_uid != 0:
        tell_once(folder, "it belongs to another user")
        return False
    if status.st_mode & stat.S_IWOTH:
        tell_once(folder, "everybody may write there")
        return False
    if status.st_mode & stat.S_IWGRP and hasattr(os, "getegid") and status.st_gid != os.getegid():
        tell_once(folder, "a group may write there")
        return False
    return True


@cache
def tell_once(folder: Path, why: str) -> None:
    """Warn that a folder of the cache is not used, or not wholly; the run goes on without."""
    warnings.warn(
        f"Entries can't be kept in {folder}, or taken from there ({why}). The run goes on, and works out anew what it "
        "needs. Name another folder with `MEMFIT_CACHE`.",
        stacklevel=2,
    )
