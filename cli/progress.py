"""A line on stderr about what takes long: live on a terminal, now and then in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from lightning_memfit.planner.search import Working

_BETWEEN = 5.0
"""Seconds between lines in a pipe."""

_ERASE = "\r\x1b[2K"


class ProgressLine:
    """Show what a command is at, and for how long; use it as a context, which takes the live line away.

    There is no thread: a trace may run in a fork of this process, where locks of other threads would stay taken.
    """

    def __init__(
        self,
        doing: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_quiet: bool = False,
    ) -> None:
        self._doing = doing
        self._stream = stream or sys.stderr
        self._clock, self._is_quiet = clock, is_quiet
        self._began = clock()
        self._said = float("-inf")

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream.isatty() and self._said > float("-inf"):
            print(_ERASE, end="", file=self._stream, flush=True)

    def __call__(self, working: Working) -> None:
        """Show how far a search is."""
        self.tell(working.words())

    def tell(self, words: str) -> None:
        """Show what happens now: at once on a terminal, in a pipe if nothing was said for a while."""
        now = self._clock()
        if self._is_quiet:
            return
        seconds = round(now - self._began)
        line = f"memfit: {self._doing}{f' for {seconds} s' if seconds else ''}: {words}"
        if self._stream.isatty():
            print(f"{_ERASE}{line[: get_terminal_size().columns - 1]}", end="", file=self._stream, flush=True)
        elif now - self._said >= _BETWEEN:
            print(line, file=self._stream, flush=True)
        else:
            return
        self._said = now
