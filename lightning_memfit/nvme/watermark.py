"""A watch on free space: upstream reports writes to a full disk as done, and training goes on with wrong numbers."""

import os
from pathlib import Path

from lightning_memfit.memory import format_bytes


class DiskWatermarkError(RuntimeError):
    """The drive is about to be full."""


def check_reserve(folder: str | Path, reserve_bytes: int) -> None:
    """Stop a run while its drive still has room.

    Swap files are allocated once and then rewritten, so that the remaining space is only used up by checkpoints and
    other programs.

    Args:
        folder: Folder on the drive.
        reserve_bytes: Bytes that must stay free.

    Raises:
        DiskWatermarkError: If there are fewer; nothing of this step or later ones should be trusted or saved.
    """
    free = free_bytes(folder)
    if free < reserve_bytes:
        raise DiskWatermarkError(
            f"Only {format_bytes(free)} were left free at {folder}, less than the reserve of "
            f"{format_bytes(reserve_bytes)}. Stopped before writes get lost silently: free some space there, then "
            "resume from the last checkpoint."
        )


def free_bytes(folder: str | Path) -> int:
    """Free space of a file system for this user."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize
