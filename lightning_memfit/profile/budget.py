"""Where a traced or measured run ends at the latest, whatever its code does.

Batches and operators look at the clock. Code that calls neither, because it waits for what never comes or turns in a
loop of its own, is ended from another thread.
"""

import _thread
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_memfit.profile.culprit import calling_line


@dataclass(frozen=True)
class TraceLimits:
    """Where a traced or measured run ends at the latest.

    Raises:
        ValueError: If a limit leaves no room for two batches.
    """

    seconds: float = 60.0
    """Time of one run, less what it waited for a core that other programs used (Linux). A third of it is for batches
    beyond those that show every optimizer's second step."""
    batches: int = 1000
    """Batches from the loader."""
    operators: int = 5_000_000
    """Calls of operators."""

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0), ("batches", 1), ("operators", 0)):
            if not getattr(self, name) > least:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be more than {least}.")


class LimitReached(BaseException):
    """A run came to one of its limits; not an `Exception`, so that no handler of the module's goes on with it."""


class Budget:
    """Counts operators and time of one run.

    Args:
        limits: Where to stop.
    """

    _EVERY = 256
    """Operators between two looks at the clock."""
    _EXTRA_SHARE = 1 / 3
    """Of the time, for batches beyond those that are needed."""
    _IDLE_SHARE, _LEAST_IDLE = 0.1, 0.5
    """Of the time, and seconds, without an operator or a batch, after which a run whose time is over is ended."""

    def __init__(self, limits: TraceLimits) -> None:
        self.limits = limits
        self.operators = 0
        self._looks = 0
        self._next_look = self._EVERY
        self.start()

    def start(self) -> None:
        """Start the clock anew, for this thread."""
        self._thread = threading.get_native_id()
        self._started, self._waited = time.monotonic(), _seconds_without_core(self._thread)

    @property
    def is_mostly_used(self) -> bool:
        """Whether there is no time for more batches than needed."""
        return self._is_over(self.limits.seconds * self._EXTRA_SHARE)

    def count_operator(self) -> None:
        """Count an operator.

        Raises:
            LimitReached: If the time is over, or there were too many operators.
        """
        self.operators += 1
        if self.operators >= self._next_look:
            self._next_look += self._EVERY
            self.check_time()
            if self.operators > self.limits.operators:
                raise LimitReached(f"{self.limits.operators:,} operators{calling_line()}")

    def check_time(self) -> None:
        """Look at the clock.

        Raises:
            LimitReached: If the time is over.
        """
        self._looks += 1
        if self._is_over(self.limits.seconds):
            raise LimitReached(f"{self.limits.seconds:g} s{calling_line()}")

    def _is_over(self, seconds: float) -> bool:
        """Whether that much time has passed; a busy machine must not end a run that would be known on a quiet one."""
        passed = time.monotonic() - self._started
        return passed > seconds and passed - (_seconds_without_core(self._thread) - self._waited) > seconds

    # --- without operators ------------------------------------------------------------------------------------------

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """End what this thread runs, too, where it calls no operators: raise `LimitReached` in it when time is over.

        Of budgets within budgets the innermost counts.
        """
        ended = _thread.allocate_lock()
        ended.acquire()
        with _interruptible() as interrupt:
            _enforced.append(self)
            watching = ended, threading.get_ident(), interrupt
            _thread.start_new_thread(self._watch, watching)  # which no patch and no list of threads knows
            try:
                yield
            finally:
                _enforced.remove(self)
                ended.release()

    def _watch(self, ended: Any, thread: int, interrupt: Callable[[LimitReached], None]) -> None:
        idle = max(self.limits.seconds * self._IDLE_SHARE, self._LEAST_IDLE)
        before = None
        while not ended.acquire(timeout=idle):
            now = (self.operators, self._looks, len(_enforced))
            if now == before and _enforced[-1:] == [self] and self._is_over(self.limits.seconds):
                seconds = f"{self.limits.seconds:g} s"
                interrupt(LimitReached(f"{seconds}, the last of them without an operator{calling_line(thread)}"))
            before = now


_enforced: list[Budget] = []
"""Budgets of the runs that go on, each within the one before."""

_SIGNAL: Any = getattr(signal, "SIGURG", None)
"""A signal that does nothing by default. Of those that reach a thread which waits for a lock, it is the least used."""


class _Raise:
    """A handler of a signal that raises an error."""

    error: LimitReached | None = None
    """Raised once; a signal that comes from elsewhere does nothing."""

    def __call__(self, number: int, frame: Any) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


@contextmanager
def _interruptible() -> Iterator[Callable[[LimitReached], None]]:
    """Give a function by which another thread raises an error in this one.

    The main thread gets a signal, so that even one that waits is reached. Others, and a main thread whose program has
    its own use for that signal, are reached when they next run Python's code.
    """
    thread = threading.get_ident()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(_SIGNAL) if is_main and _SIGNAL is not None else None
    if before is not signal.SIG_DFL and not isinstance(before, _Raise):
        try:
            yield lambda error: _raise_in(thread, error)
        finally:
            _raise_in(thread, None)
        return

    def interrupt(error: LimitReached) -> None:
        handler.error = error
        signal.pthread_kill(thread, _SIGNAL)

    handler = _Raise()
    signal.signal(_SIGNAL, handler)
    try:
        yield interrupt
    finally:
        signal.signal(_SIGNAL, before)


def _raise_in(thread: int, error: LimitReached | None) -> None:
    """Raise an error in a thread when it next runs Python's code; None takes one back that was not raised yet."""
    kind = None
    if error is not None:  # the interpreter makes the error itself, out of a class
        kind = ctypes.py_object(type("LimitReached", (LimitReached,), {"__str__": lambda raised: str(error)}))
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)


def _seconds_without_core(thread: int) -> float:
    """Seconds for which a thread could have run but had no core; 0 where the system doesn't tell.

    The second number of Linux's `schedstat` (Documentation/scheduler/sched-stats.rst), in nanoseconds.

    Args:
        thread: Its number in the system.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
