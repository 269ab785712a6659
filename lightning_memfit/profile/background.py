"""Run functions in a forked copy of this process while this one goes on: one in `in_child`, many in `ForkedWorker`."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, TypeVar

import torch
from typing_extensions import override

T = TypeVar("T")


_Outcome = tuple[Any, Exception | None] | None
"""Result or exception of a function; None if it can't be sent from one process to the other."""


class Starter(Protocol):
    """Starts a function, and returns a callable that waits for its result or raises its exception."""

    def __call__(self, function: Callable[[], T], /) -> Callable[[], T]:  # noqa: D102
        ...


def in_child(function: Callable[[], T]) -> Callable[[], T]:
    """Start a function in a forked process; the returned callable waits for its result, or raises its exception.

    Where a fork is not safe (other threads, a CUDA context, a system other than Linux) or has no core of its own, if
    autograd does not work in it, and if the child dies, the function runs in this process when its result is asked for.
    A result that nobody asks for costs only the child's time: the child is a daemon and ends with this process.

    Args:
        function: Runs with one thread; anew in this process if its result or exception can't be pickled.
    """
    if not _can_fork():
        return function
    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = _fork(_run, function, sending)
    sending.close()

    def result() -> T:
        try:
            outcome = _read(receiving.recv_bytes())
        except (EOFError, OSError):  # it ended before its answer, or in the middle of one
            outcome = None
        except BaseException:  # Ctrl-C, which may have reached this process alone
            process.kill()
            raise
        finally:
            receiving.close()  # first: a child whose answer nobody reads any more ends by that
            process.join()
        return _taken(outcome, function)

    return result


class ForkedWorker:
    """A copy of this process, forked once, that runs one function after the other beside it.

    What either process writes to after a fork is copied page by page, which makes a trace in a fresh fork, and the one
    beside it, half again as long; a worker pays for that once. It is forked by the first function that it is given.
    That should come before this process has run a backward pass: after one, forks of a build for an accelerator run
    none (`_autograd_works`).

    Functions travel as pickles: a `functools.partial` of what a module of Python holds, say. One that can't be pickled,
    or that holds a `torch.nn.Module` that both don't share, runs as under `in_child`; where there can be no fork, and
    after the worker has died, functions run in this process when their results are asked for.

    Args:
        shared: Objects that both have, as they are at the fork. Functions hold them without their being copied; from
            then on neither process may change them in a way that matters to the other.
    """

    def __init__(self, *shared: object) -> None:
        self._shared = shared
        self._owner = os.getpid()
        self._connection: Connection | None = None
        self._gone = False
        self._sent = 0
        self._received: list[_Outcome] = []

    def start(self, function: Callable[[], T], /) -> Callable[[], T]:
        """Start a function; the returned callable waits for its result, or raises its exception.

        Args:
            function: Runs with one thread; anew in this process if its result or exception can't be pickled.
        """
        if self._gone or os.getpid() != self._owner:
            return function
        task = self._pickled(function)
        if task is None:
            return in_child(function)
        if not self._send(task):
            return function
        number = self._sent
        self._sent += 1

        def result() -> T:
            while len(self._received) <= number:
                if not self._receive():
                    return function()
            outcome, self._received[number] = self._received[number], None
            return _taken(outcome, function)

        return result

    def _pickled(self, function: Callable[[], Any]) -> bytes | None:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._shared).dump(function)
        except Exception:  # objects raise what they like when they are asked for their state
            return None
        return buffer.getvalue()

    def _send(self, task: bytes) -> bool:
        """Hand a task to the worker; False if there is none."""
        while self._connection is not None and len(self._received) < self._sent:
            self._receive()  # of what nobody asked for: else either may wait for the other to read
        if self._gone:
            return False
        if self._connection is None:
            if not _can_fork():
                self._gone = True
                return False
            self._connection, theirs = multiprocessing.get_context("fork").Pipe()
            _fork(_serve, theirs, self._connection, self._shared)
            theirs.close()
        try:
            self._connection.send_bytes(task)
        except OSError:
            self._lose()
        return not self._gone

    def _receive(self) -> bool:
        """Take the next result; False if the worker has died."""
        if self._connection is not None:
            try:
                answer = self._connection.recv_bytes()
            except (EOFError, OSError):
                self._lose()
                return False
            self._received.append(_read(answer))
        return not self._gone

    def _lose(self) -> None:
        self._gone = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Pickler(pickle.Pickler):
    """Writes objects that both processes have as their places among them."""

    def __init__(self, file: io.BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file)
        self._places = {id(value): place for place, value in enumerate(shared)}

    @override
    def persistent_id(self, value: Any) -> int | None:
        place = self._places.get(id(value))
        if place is None and isinstance(value, torch.nn.Module):
            raise pickle.PicklingError("a module, with all of its weights")
        return place


class _Unpickler(pickle.Unpickler):
    """Reads what a `_Pickler` of this very process wrote."""

    def __init__(self, file: io.BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file)
        self._shared = shared

    @override
    def persistent_load(self, place: int) -> object:
        return self._shared[place]


def _serve(connection: Connection, theirs: Connection, shared: tuple[object, ...]) -> None:
    """Run what comes until the other process ends, or closes its side."""
    theirs.close()
    torch.set_num_threads(1)  # see `_run`
    try:
        while _autograd_works():
            task = connection.recv_bytes()
            try:
                function = _Unpickler(io.BytesIO(task), shared).load()
            except Exception:
                function = None
            connection.send_bytes(_answer(function))
    except BaseException:
        pass  # see `_run`
    connection.close()


def _fork(target: Callable[..., None], *args: object) -> multiprocessing.process.BaseProcess:
    """Start a function in a fork that ends with this process."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on forking while native threads run
        process.start()
    return process


def _can_fork() -> bool:
    return (
        sys.platform == "linux"
        and hasattr(os, "fork")
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
        and len(os.sched_getaffinity(0)) > 1
    )


def _run(function: Callable[[], T], sending: Connection) -> None:
    # A forked child has none of the threads that this process may have started for parallel operators, and such an
    # operator would wait for them for ever.
    torch.set_num_threads(1)
    if _autograd_works():
        with suppress(BaseException):  # the other process runs the function itself, and sees it there
            sending.send_bytes(_answer(function))
    sending.close()


def _answer(function: Callable[[], Any] | None) -> Any:
    """Run a function, and write its outcome down for the other process."""
    if function is None:
        return ForkingPickler.dumps(None)
    try:
        outcome: _Outcome = (function(), None)
    except Exception as error:
        outcome = (None, error)
    try:
        return ForkingPickler.dumps(outcome)
    except Exception:  # objects raise what they like when they are asked for their state
        return ForkingPickler.dumps(None)


def _read(answer: bytes) -> _Outcome:
    """Read what `_answer` wrote; None if that can't be, as where an exception takes other arguments than it holds."""
    try:
        found: _Outcome = pickle.loads(answer)  # nosec B301  # from a fork of this process
        return found
    except Exception:
        return None


def _taken(outcome: _Outcome, function: Callable[[], T]) -> T:
    """Return the result of a function that ran elsewhere or raise its exception; without an outcome, run it here."""
    if outcome is None:
        return function()
    value, error = outcome
    if error is not None:
        raise error
    found: T = value
    return found


def _autograd_works() -> bool:
    """Whether this process can run a backward pass.

    A build of torch for an accelerator starts threads for devices at the first backward pass, with or without a device,
    and refuses every other one in processes that are forked from then on. Only these know.
    """
    with torch.inference_mode(False), torch.enable_grad():
        try:
            torch.ones((), requires_grad=True).backward()
        except RuntimeError:
            return False
    return True
