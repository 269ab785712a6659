"""Run a function in one process per rank, and find out how and when each of them ends."""

import faulthandler
import importlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import cloudpickle
import pytest
import torch

num_ranks = 1
"""Ranks of the run that this process belongs to; Lightning takes `WORLD_SIZE` away after a run."""


@dataclass
class Ended:
    """How the process of one rank ended.

    Attributes:
        code: Its exit status; the negative number of the signal that ended it.
        seconds: Until its end.
        output: What it printed.
        result: What the function returned; None if it didn't.
        error: What the function raised, in words; empty if it didn't.
    """

    code: int | None
    seconds: float
    output: str
    result: Any
    error: str


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *args: Any,
    seconds: float = 120.0,
    patches: dict[str, Any] | None = None,
) -> list[Ended]:
    """Call `function(*args)` on every rank; processes that have not ended after some time are killed.

    The processes are independent of each other, as those of a launcher on several machines are. They are forked from a
    server that began before any test ran: what tests leave in their process, as a process group or threads, is not in
    them, and neither is what a test has patched. What is killed says so in its output, and where it was.

    Args:
        function: May be a lambda or a function of the test; it and its arguments are pickled by value.
        seconds: The time in which a rank has waited for a core doesn't count.
        patches: What to set in the ranks' processes, by dotted name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    call = cloudpickle.dumps((function, args, patches or {}))
    server = _server()
    try:
        server.send((call, world_size, str(folder.resolve()), seconds, dict(os.environ), os.getcwd(), sys.path))
        ends = server.recv()
    except BaseException:
        stop_server()  # of a test that ran out of time, too: its ranks end here
        raise
    return [_ended(folder, rank, *end) for rank, end in enumerate(ends)]


_running: tuple[int, int, Connection] | None = None
"""This process, that of its server, and the way to it."""


def start_server() -> None:
    """Fork the process that forks ranks. Ranks have what was imported before."""
    global _running
    ours, theirs = multiprocessing.Pipe()
    process = os.fork()
    if process == 0:
        ours.close()
        try:
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    _running = os.getpid(), process, ours


def stop_server() -> None:
    """End the server and every rank that it has forked."""
    global _running
    if _running and _running[0] == os.getpid():
        _running[2].close()
        with suppress(ProcessLookupError):
            os.killpg(_running[1], signal.SIGKILL)
        os.waitpid(_running[1], 0)
    _running = None


def _server() -> Connection:
    if not _running or _running[0] != os.getpid():  # this process may have been forked from one that has a server
        start_server()
    assert _running
    return _running[2]


def _serve(requests: Connection) -> None:
    """In the server: start ranks until the process that asked for it is gone."""
    os.setsid()
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while os.getppid() == parent:
        if not requests.poll(1.0):
            continue
        try:
            call, world_size, folder, seconds, environment, current, sys.path[:] = requests.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(current)
        requests.send(_run_all(call, world_size, Path(folder), seconds, parent))


def _run_all(call: bytes, world_size: int, folder: Path, seconds: float, parent: int) -> list[tuple[int, float]]:
    """Exit status and seconds of every rank."""
    _import_what_ranks_did()
    port = free_port()
    context = multiprocessing.get_context("fork")
    begin = time.monotonic()
    processes = [
        context.Process(target=_run, args=(call, rank, world_size, port, folder)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    ends: dict[int, float] = {}
    while len(ends) < world_size and time.monotonic() - begin - max(map(_waited, processes)) < seconds:
        time.sleep(0.05)
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        for rank, process in enumerate(processes):
            if rank not in ends and not process.is_alive():
                ends[rank] = time.monotonic() - begin
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        with (folder / f"output-{rank}.txt").open("a") as output:
            output.write(f"\nrank {rank} had not ended after {time.monotonic() - begin:.0f} s and is killed here:\n")
        os.kill(cast(int, processes[rank].pid), signal.SIGUSR2)
    time.sleep(0.5 if late else 0)
    for rank in late:
        os.kill(cast(int, processes[rank].pid), signal.SIGKILL)
    for process in processes:
        process.join()
    for names in folder.glob("imported-*.txt"):
        _imported_by_ranks.update(names.read_text().split())
        names.unlink()
    return [(cast(int, process.exitcode), ends.get(rank, seconds)) for rank, process in enumerate(processes)]


_imported_by_ranks: set[str] = set()


def _import_what_ranks_did() -> None:
    """Import what earlier ranks imported of libraries: later ones are forked with it.

    An engine of DeepSpeed takes a second for it, in every rank.
    """
    for name in sorted(_imported_by_ranks):
        if name.partition(".")[0] in sys.modules:
            with suppress(ImportError):
                importlib.import_module(name)
    _imported_by_ranks.clear()


def _waited(process: Any) -> float:
    """Seconds in which a process was ready to run and had no core; 0 once it has ended, or where nobody tells."""
    try:
        return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def free_port() -> int:
    """A port below those that systems give to any connection, so that none takes it before the ranks listen."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _ended(folder: Path, rank: int, code: int, seconds: float) -> Ended:
    outcome = folder / f"outcome-{rank}.pt"
    result, error = torch.load(outcome, weights_only=False) if outcome.exists() else (None, "")
    return Ended(code, seconds, (folder / f"output-{rank}.txt").read_text(), result, error)


def _run(call: bytes, rank: int, world_size: int, port: int, folder: Path) -> None:
    """In the process of a rank: call the function and leave what it returned or raised in a file."""
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    faulthandler.enable(sys.stderr)  # where a library ends the process, it says in which call
    faulthandler.register(signal.SIGUSR2, sys.stderr)
    names = {"LOCAL_RANK": rank, "RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    global num_ranks
    num_ranks = world_size
    torch.set_num_threads(1)
    outcome = folder / f"outcome-{rank}.pt"
    known = set(sys.modules)
    try:
        function, args, patches = cloudpickle.loads(call)
        for name, value in patches.items():
            pytest.MonkeyPatch().setattr(name, value)
        torch.save((function(*args), ""), outcome)
    except BaseException as error:
        torch.save((None, f"{type(error).__name__}: {error}"), outcome)
        traceback.print_exc()
        sys.stderr.flush()
        _tell_imports(folder, rank, known)
        os._exit(1)
    sys.stdout.flush()
    _tell_imports(folder, rank, known)
    os._exit(0)  # without the handlers of the process that it was forked from


def _tell_imports(folder: Path, rank: int, known: set[str]) -> None:
    """Leave the names of modules that a rank imported, where it didn't end in another folder or take it away."""
    libraries = {name for name in sys.modules.keys() - known if name.partition(".")[0] in _LIBRARIES}
    with suppress(OSError):
        (folder / f"imported-{rank}.txt").write_text("\n".join(libraries))


_LIBRARIES = ("deepspeed", "lightning", "sympy", "networkx", "torch", "torchmetrics", "transformers")
