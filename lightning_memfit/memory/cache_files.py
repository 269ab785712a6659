"""Files of the cache folder: never the reason why a run stops. They hold plain data and no code."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO


def default_cache_folder() -> Path:
    """`$MEMFIT_CACHE`, else `$XDG_CACHE_HOME/lightning-memfit`, else `~/.cache/lightning-memfit`."""
    named = os.environ.get("MEMFIT_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-memfit"


def read_entry(path: Path) -> dict[str, Any] | None:
    """Return the plain values of an entry; None if there is none, or none that can be read, which is said once.

    Args:
        path: The entry's file, written by `write_entry`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        tell_once(path.parent, f"{path.name} can't be read: {error}")
        return None
    return content if isinstance(content, dict) else None


def write_entry(path: Path, content: dict[str, Any]) -> bool:
    """Write plain values in place of an older entry; return whether that worked. If not, it is said once.

    Args:
        path: The entry's file.
        content: Plain values.
    """
    text = json.dumps(content, indent=1) + "\n"
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


@cache
def tell_once(folder: Path, why: str) -> None:
    """Warn that a folder of the cache is not used, or not wholly; the run goes on without."""
    warnings.warn(
        f"Entries can't be kept in {folder}, or taken from there ({why}). The run goes on, and works out anew what it "
        "needs. Name another folder with `MEMFIT_CACHE`.",
        stacklevel=2,
    )
