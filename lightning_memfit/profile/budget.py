"""Where a traced or measured run ends at the latest, whatever its code does.

Batches and operators look at the clock. Code that calls neither, because it waits for what never comes or turns in a
loop of its own, is ended from another thread.
"""

import _thread
import ctypes
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import override

from lightning_memfit.profile.culprit import calling_line, owner_of_frame, running_frames


@dataclass(frozen=True)
class TraceLimits:
    """Where a traced or measured run ends at the latest.

    Raises:
        ValueError: If a limit leaves no room for two batches.
    """

    seconds: float = 60.0
    """Time of one run's batches, and as much again for what comes before them, such as copying the module, `setup` and
    `configure_optimizers`; less what it waited for a core that other programs used (Linux). A third of it is for
    batches beyond those that show every optimizer's second step."""
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

        Only code of others is ended: what Lightning and this package do to clean up goes on. Of budgets within budgets
        the innermost counts, and its time is none of the others'.
        """
        ended = _thread.allocate_lock()
        ended.acquire()
        thread = threading.get_native_id()
        began, waited = time.monotonic(), _seconds_without_core(thread)
        with _interruptible(sys._getframe(2)) as region:  # past this one and that of `contextlib`
            _enforced.append(self)
            _thread.start_new_thread(self._watch, (ended, region))  # which no patch and no list of threads knows
            try:
                yield
            finally:
                try:
                    region.leave()
                except LimitReached:  # that it was about to be left with
                    region.leave()
                    raise
                finally:
                    _enforced.remove(self)
                    ended.release()
                    for outer in _enforced:
                        outer._started += time.monotonic() - began
                        outer._waited += _seconds_without_core(thread) - waited

    def _watch(self, ended: Any, region: "_Region") -> None:
        idle = max(self.limits.seconds * self._IDLE_SHARE, self._LEAST_IDLE)
        before = None
        while not ended.acquire(timeout=idle):
            now = (self.operators, self._looks, len(_enforced))
            if now == before and _enforced[-1:] == [self] and self._is_over(self.limits.seconds):
                seconds = f"{self.limits.seconds:g} s"
                region.interrupt(
                    LimitReached(f"{seconds}, the last of them without an operator{calling_line(region.thread)}")
                )
            before = now


_enforced: list[Budget] = []
"""Budgets of the runs that go on, each within the one before."""

_SIGNAL: Any = getattr(signal, "SIGURG", None)
"""A signal that does nothing by default. Of those that reach a thread which waits for a lock, it is the least used."""


class _Region:
    """What this thread calls from a frame on, until it leaves it: where another thread may raise an error.

    The error reaches the thread when it next runs Python's code.

    Args:
        base: The frame.
    """

    def __init__(self, base: FrameType) -> None:
        self.thread = threading.get_ident()
        self._base: FrameType | None = base
        self._lock = threading.Lock()

    def interrupt(self, error: LimitReached) -> None:
        """Raise an error in the thread, if it runs code of others in this region."""
        with self._lock:
            if self._runs_others_code(next(running_frames(self.thread), None)):
                self._send(error)

    def leave(self) -> None:
        """Let nothing be raised any more, what is on its way included."""
        with self._lock:
            self._base = None
            self._take_back()

    def _runs_others_code(self, frame: FrameType | None) -> bool:
        """Whether a frame, or one that called it, is the user's or an installed package's, up to the base."""
        found = False
        while frame is not None:
            found = found or owner_of_frame(frame) in ("user", "library")
            if frame is self._base:
                return found
            frame = frame.f_back
        return False

    def _send(self, error: LimitReached) -> None:
        _raise_in(self.thread, error)

    def _take_back(self) -> None:
        _raise_in(self.thread, None)


class _SignalledRegion(_Region):
    """A region of the main thread, which a signal reaches even where it waits."""

    _error: LimitReached | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise the error, once; a signal that comes from elsewhere, or too late, does nothing."""
        error, self._error = self._error, None
        if error is not None and self._runs_others_code(frame):
            raise error

    @override
    def _send(self, error: LimitReached) -> None:
        self._error = error
        signal.pthread_kill(self.thread, _SIGNAL)

    @override
    def _take_back(self) -> None:
        self._error = None


@contextmanager
def _interruptible(base: FrameType) -> Iterator[_Region]:
    """Give the region from a frame of this thread on.

    The main thread gets a signal; a main thread whose program has its own use for that signal is treated as others are.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(_SIGNAL) if is_main and _SIGNAL is not None else None
    is_free = before is signal.SIG_DFL or isinstance(getattr(before, "__self__", None), _SignalledRegion)
    if not is_free:
        yield _Region(base)
        return
    region = _SignalledRegion(base)
    signal.signal(_SIGNAL, region.handle)
    try:
        yield region
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
