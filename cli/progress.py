"""A line on stderr about what takes long: live on a terminal, now and then in a pipe."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from lightning_memfit.planner.search import Working

_QUICK, _BETWEEN = 2.0, 5.0
"""Seconds in which nothing is said, and between lines in a pipe."""

_ERASE = "\r\x1b[2K"


class ProgressLine:
    """Show what a command is at, and for how long; use it as a context, which takes the live line away.

    A timer's signal shows it during a long trace. There is no thread: a trace may run in a fork of this process, where
    locks of other threads would stay taken. Windows has no such signal, and shows changes alone.

    Args:
        doing: What the command does, in a word.
        stream: Where it is shown; stderr by default.
        clock: Seconds, for tests.
        is_quiet: Whether to say nothing.
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
        self._words = ""
        self._restore: Callable[[], object] = str

    def __enter__(self) -> ProgressLine:
        is_main = threading.current_thread() is threading.main_thread()
        if hasattr(signal, "SIGALRM") and is_main and not self._is_quiet:
            handler = signal.signal(signal.SIGALRM, lambda *_: self._show())
            timer = signal.setitimer(signal.ITIMER_REAL, _QUICK, 1.0)

            def restore() -> None:
                signal.setitimer(signal.ITIMER_REAL, *timer)
                signal.signal(signal.SIGALRM, handler)

            self._restore = restore
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        if self._stream.isatty() and self._said > 0:
            print(_ERASE, end="", file=self._stream, flush=True)

    def __call__(self, working: Working) -> None:
        """Show how far a search is, if it has taken long."""
        self.tell(working.words())

    def tell(self, words: str) -> None:
        """Show what happens now, if the command has taken long."""
        self._words = words
        self._show()

    def _show(self) -> None:
        now = self._clock()
        if self._is_quiet or not self._words or now - self._began < _QUICK:
            return
        line = f"memfit: {self._doing} for {now - self._began:.0f} s: {self._words}"
        with suppress(RuntimeError):  # the signal came while something else is printed there
            if self._stream.isatty():
                print(f"{_ERASE}{line[: get_terminal_size().columns - 1]}", end="", file=self._stream, flush=True)
            elif now - self._said >= _BETWEEN:
                print(line, file=self._stream, flush=True)
            else:
                return
            self._said = now
