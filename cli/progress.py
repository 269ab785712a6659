"""A line on stderr about a plan that takes long: live on a terminal, now and then in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from lightning_memfit.planner.search import Working

_QUICK, _BETWEEN = 2.0, 5.0
"""Seconds in which nothing is said, and between lines in a pipe."""

_ERASE = "\r\x1b[2K"


class PlanningLine:
    """Show a search's progress; use it as a context, which takes the live line away.

    There is no thread: a trace may run in a fork of this process, where locks of other threads would stay taken.

    Args:
        stream: Where it is shown; stderr by default.
        clock: Seconds, for tests.
        is_quiet: Whether to say nothing.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic, is_quiet: bool = False
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock, self._is_quiet = clock, is_quiet
        self._began = clock()
        self._said = float("-inf")

    def __enter__(self) -> PlanningLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream.isatty() and self._said > 0:
            print(_ERASE, end="", file=self._stream, flush=True)

    def __call__(self, working: Working) -> None:
        """Show how far the search is, if it has taken long."""
        now = self._clock()
        line = f"memfit: planning for {now - self._began:.0f} s: {working.words()}"
        if self._is_quiet or now - self._began < _QUICK:
            return
        if self._stream.isatty():
            print(f"{_ERASE}{line[: get_terminal_size().columns - 1]}", end="", file=self._stream, flush=True)
        elif now - self._said >= _BETWEEN:
            print(line, file=self._stream, flush=True)
        else:
            return
        self._said = now
