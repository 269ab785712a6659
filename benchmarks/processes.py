"""Run cases in processes of their own, so that one's memory doesn't touch another's, and one that dies is a row."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One case and what is done with it."""

    function: Callable[..., Row]
    """Called with the case and the arguments, in a forked process."""
    case: Any
    """Something with a `name`, for the row of a process that failed, died, or was killed."""
    arguments: tuple[Any, ...] = ()
    size: float = 0.0
    """What it takes of the room that jobs at a time share."""


@dataclass
class _Running:
    job: Job
    process: ForkProcess
    receive: Connection
    seconds: float
    ends: float

    def row(self) -> Row | None:
        """What came back, the failure of a process that ended or ran out of time, or None while it may go on."""
        name = self.job.case.name
        try:
            if self.receive.poll():
                row: Row = self.receive.recv()
            elif time.monotonic() < self.ends:
                return None
            else:
                self.process.kill()
                row = {"name": name, "failed": f"was killed after {self.seconds:.0f} s"}
        except EOFError:
            self.process.join()
            row = {"name": name, "failed": f"its process ended with exit code {self.process.exitcode}"}
        self.process.join()
        self.receive.close()
        return row


def rows_of(
    jobs: Sequence[Job], seconds: float, at_once: int = 1, room: float = float("inf"), until: float = float("inf")
) -> Iterator[Row]:
    """Rows of jobs as they end; jobs start in their order.

    Args:
        jobs: What is run.
        seconds: Time after which a job's process is killed.
        at_once: Processes at a time.
        room: What the sizes of jobs that run at a time add up to at most; a larger job runs alone.
        until: No job is started when `time.monotonic()` is past this.
    """
    waiting, running = list(jobs), list[_Running]()
    while True:
        while waiting and time.monotonic() < until and len(running) < at_once:
            if running and waiting[0].size + sum(one.job.size for one in running) > room:
                break
            running.append(_start(waiting.pop(0), seconds))
        if not running:
            return
        wait([one.receive for one in running], max(0.0, min(one.ends for one in running) - time.monotonic()))
        for one in list(running):
            if (row := one.row()) is not None:
                running.remove(one)
                yield row


def in_a_process(function: Callable[..., Row], case: Any, *arguments: Any, seconds: float) -> Row:
    """The row of one case; see `Job`, and `seconds` of `rows_of`."""
    (row,) = rows_of([Job(function, case, arguments)], seconds)
    return row


@dataclass(frozen=True)
class _Named:
    name: str


def each(
    job: Callable[[str], Any], names: Iterable[str], seconds: float, processes: int = 1
) -> Iterator[tuple[str, Any]]:
    """Names as their jobs end, each with what `job(name)` returned or an error that says how it ended instead."""
    torch.set_num_threads(1)
    jobs = [Job(_row_of, _Named(name), (job,)) for name in names]
    for row in rows_of(jobs, seconds, processes):
        yield row["name"], RuntimeError(row["failed"]) if "failed" in row else row["returned"]


def _row_of(named: _Named, job: Callable[[str], Any]) -> Row:
    return {"name": named.name, "returned": job(named.name)}


def _start(job: Job, seconds: float) -> _Running:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, job))
    process.start()
    send.close()  # the child's is then the only one, so that its death ends the wait
    return _Running(job, process, receive, seconds, time.monotonic() + seconds)


def _child(connection: Connection, job: Job) -> None:
    torch.manual_seed(0)
    try:
        connection.send(job.function(job.case, *job.arguments))
    except BaseException as error:
        connection.send({"name": job.case.name, "failed": f"{type(error).__name__}: {error}"[:500]})
        traceback.print_exc()
