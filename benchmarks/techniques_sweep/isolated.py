"""Run jobs in processes of their own, two at a time: one that crashes or hangs is a row and not the end."""

import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOADED = ("torch", "lightning.pytorch", "transformers", "peft", "bitsandbytes")


def each(job: Callable[[str], Any], names: Iterable[str], seconds: float, processes: int) -> Iterator[tuple[str, Any]]:
    """What `job(name)` returns for each name, as it comes.

    Args:
        job: A function that another process can import.
        names: Names of jobs.
        seconds: Time limit of a job.
        processes: How many run at a time.

    Yields:
        Name, and result or an `Exception` that says how the process ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    waiting = list(names)[::-1]
    running: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(job, name, theirs))
            process.start()
            theirs.close()
            running[ours] = (name, process, time.monotonic() + seconds)
        for pipe in wait(list(running), timeout=0.5):
            assert isinstance(pipe, Connection)
            name, process, _ = running.pop(pipe)
            try:
                result: Any = pipe.recv()
            except EOFError:
                process.join(5)
                result = RuntimeError(f"the process ended with exit code {process.exitcode}")
            process.join(5)
            yield name, result
        for pipe, (name, process, limit) in list(running.items()):
            if time.monotonic() > limit:
                running.pop(pipe)
                process.kill()
                process.join(5)
                yield name, TimeoutError(f"not done in {seconds:.0f} s")


def _run(job: Callable[[str], Any], name: str, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(job(name))
    except BaseException as error:  # the row says so
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
