"""A line on stderr about a plan that takes long: live on a terminal, now and then in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from lightning_memfit.planner.progress import Working

_QUICK = 2.0
"""Seconds in which nothing is said."""

_BETWEEN = 5.0
"""Seconds between lines in a pipe."""


class PlanningLine:
    """Show a search's progress; use it as a context, which takes the live line away.

    There is no thread: a trace may run in a fork of this process, where locks of other threads would stay taken.

    Args:
        stream: Where it is shown; stderr by default.
        clock: Seconds, for tests.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream)
        self._clock = clock
        self._began = clock()
        self._said = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> PlanningLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, working: Working) -> None:
        """Show how far the search is, if it has taken long."""
        now = self._clock()
        if now - self._began < _QUICK:
            return
        line = f"memfit: planning for {now - self._began:.0f} s: {working.words()}"
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._show(line)
        elif now - self._said >= _BETWEEN:
            self._said = now
            print(line, file=self._stream, flush=True)

    def _show(self, line: str) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(Text(line), refresh=True)
