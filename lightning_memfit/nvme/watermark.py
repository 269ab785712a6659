"""A watch on free space: upstream reports writes to a full disk as done, and training goes on with wrong numbers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

from lightning_memfit.memory import GIB, format_bytes


class DiskWatermarkError(RuntimeError):
    """The drive is about to be full."""


class DiskWatermark:
    """Stop a run while its drive still has room.

    A thread looks several times a second, because a step can take minutes; `check` is called between steps, when
    raising does no harm. `statvfs` costs microseconds. Swap files are allocated once and then rewritten, so the
    remaining space is only used up by checkpoints and other programs.

    Args:
        folder: Folder on the drive to watch.
        reserve_bytes: Bytes that must stay free.
        interval_s: Seconds between two looks of the thread.

    Attributes:
        least_free_bytes: Smallest free space seen.

    Raises:
        ValueError: If the reserve is not positive.
    """

    def __init__(self, folder: str | Path, reserve_bytes: int = GIB, interval_s: float = 0.2) -> None:
        if reserve_bytes <= 0:
            raise ValueError(f"`reserve_bytes={reserve_bytes}` must be positive: a full disk corrupts the training.")
        self.folder = Path(folder)
        self.reserve_bytes = reserve_bytes
        self.interval_s = interval_s
        self.least_free_bytes = free_bytes(self.folder)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Look at the free space, and stop the run if there was too little now or at any time since the start.

        Raises:
            DiskWatermarkError: If so; nothing of this step or later ones should be trusted or saved.
        """
        self._look()
        if self.least_free_bytes < self.reserve_bytes:
            raise DiskWatermarkError(
                f"Only {format_bytes(self.least_free_bytes)} were left free at {self.folder}, less than the reserve of "
                f"{format_bytes(self.reserve_bytes)}. Stopped before writes get lost silently: free some space there, "
                "then resume from the last checkpoint."
            )

    def start(self) -> DiskWatermark:
        """Start the thread. Safe to call twice."""
        if self._thread is None:
            self._end.clear()
            self._thread = threading.Thread(target=self._run, name="memfit-disk-watermark", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> DiskWatermark:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _look(self) -> None:
        self.least_free_bytes = min(self.least_free_bytes, free_bytes(self.folder))

    def _run(self) -> None:
        while not self._end.wait(self.interval_s):
            try:
                self._look()
            except OSError:
                return  # the folder is gone: the run has ended


def free_bytes(folder: str | Path) -> int:
    """Free space of a file system for this user."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize
