"""`in_child`: run a function in a forked copy of this process while this one goes on."""

import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

T = TypeVar("T")


def in_child(function: Callable[[], T]) -> Callable[[], T]:
    """Start a function in a forked process; the returned callable waits for its result, or raises its exception.

    Where a fork is not safe (other threads, a CUDA context, a system other than Linux) or has no core of its own, if
    autograd does not work in it, and if the child dies, the function runs in this process when its result is asked for.
    A result that nobody asks for costs only the child's time: the child is a daemon and ends with this process.

    Args:
        function: Its result or exception must be picklable. It runs with one thread.
    """
    if not _can_fork():
        return function
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(function, sending), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on forking while native threads run
        process.start()
    sending.close()

    def result() -> T:
        try:
            value, error = receiving.recv()
        except EOFError:
            return function()
        finally:
            process.join()
            receiving.close()
        if error is not None:
            raise error
        found: T = value
        return found

    return result


def _can_fork() -> bool:
    return (
        sys.platform == "linux"
        and hasattr(os, "fork")
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
        and len(os.sched_getaffinity(0)) > 1
    )


def _run(function: Callable[[], T], sending: "Connection") -> None:
    # A forked child has none of the threads that this process may have started for parallel operators, and such an
    # operator would wait for them for ever.
    torch.set_num_threads(1)
    if _autograd_works():
        try:
            sending.send((function(), None))
        except Exception as error:
            sending.send((None, error))
        except BaseException:
            pass  # the other process runs the function itself, and sees it there
    sending.close()


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
