"""Run programs, and the cases of `tests.helpers.strategy_runs` in one process per rank, and collect what they found."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import free_port

ROOT = Path(__file__).parents[2]
SECONDS = 420
OF_RANKS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT", "MASTER_ADDR", "PL_GLOBAL_SEED")


def selected(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """Parameters with which a test of the fixture's file will run, so that no case is launched that none asks for."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    return [item.callspec.params if hasattr(item, "callspec") else {} for item in items if item.originalname == test]


def launch(folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run cases in one process per rank, forked from a server that has imported the libraries: seven seconds less each.

    The processes find what Lightning's launcher would have told them. Those of a failed or hanging run end together.

    Args:
        folder: Where files are put, and the working directory.
        cases: See `strategy_runs`; all for as many devices.
    """
    (ranks,) = {case.get("devices", 1) for case in cases.values()}
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = _environment()
    if ranks > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        of_rank = {"NODE_RANK": "0", "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        log = folder / "log.txt"
        processes.append(_forked(_run_cases, folder, environment | of_rank, log, log))
    end = time.monotonic() + SECONDS
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                end = min(end, time.monotonic() + 10)  # for the others to say why
            time.sleep(0.05)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return _results(folder, [process.exitcode for process in processes])


def run_program(
    program: str, *arguments: str, cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Do what `python -c PROGRAM ARGUMENTS` does, in a process that has imported the libraries, as `launch` does.

    For programs of one process: it is not one that Lightning could start again.

    Args:
        program: Text of the program.
        arguments: The rest of `sys.argv`.
        cwd: The working directory, and the first entry of `sys.path`.
        env: All of its environment.
        timeout: Seconds until it is killed.

    Raises:
        subprocess.TimeoutExpired: If it was.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out.txt"), Path(folder, "err.txt")
        process = _forked(_run_text, cwd, env, out, err, program, arguments)
        try:
            process.join(timeout)
            if process.is_alive():
                raise subprocess.TimeoutExpired(["python", "-c", program, *arguments], timeout, err.read_bytes())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def launch_anew(folder: Path, cases: dict[str, dict[str, Any]], *command: str) -> dict[str, Any]:
    """Run cases as a user would: with a new interpreter, from which Lightning starts the other ranks.

    Args:
        folder: Where files are put, and the working directory.
        cases: See `strategy_runs`.
        command: What stands in place of the plain interpreter, such as torchrun with its options.
    """
    return finish(folder, start(folder, cases, *command))


def start(folder: Path, cases: dict[str, dict[str, Any]], *command: str) -> subprocess.Popen:
    """Start a run with a new interpreter, without waiting for it."""
    (folder / "cases.json").write_text(json.dumps(cases))
    python = command or (sys.executable,)
    arguments = [*python, "-m", "tests.helpers.strategy_runs", str(folder / "cases.json"), str(folder / "results.json")]
    log = (folder / "log.txt").open("w")
    return subprocess.Popen(arguments, cwd=folder, env=_environment(), stdout=log, stderr=log, start_new_session=True)


def finish(folder: Path, *processes: subprocess.Popen) -> dict[str, Any]:
    """Wait for processes of one run, and read its results."""
    try:
        codes = [process.wait(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return _results(folder, codes)


def _results(folder: Path, codes: list[int | None]) -> dict[str, Any]:
    assert codes == [0] * len(codes), (folder / "log.txt").read_text()[-6000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def _environment() -> dict[str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return {name: value for name, value in environment.items() if name not in OF_RANKS}


@contextlib.contextmanager
def _environment_of_server(environment: dict[str, str]):
    """The server starts with the first process: what it imports reads these variables."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _forked(
    function: Callable[..., None], folder: Path, environment: dict[str, str], out: Path, err: Path, *arguments: Any
) -> BaseProcess:
    """Start a process that the server forks, and that calls a function as a new interpreter would run a program."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.helpers.preloaded"])
    with _environment_of_server(_environment()):
        process = server.Process(target=_run, args=(function, folder, environment, out, err, arguments))
        process.start()
    return process


def _run(
    function: Callable[..., None], folder: Path, environment: dict[str, str], out: Path, err: Path, arguments: Any
) -> None:
    """In the process."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    # As a user's process has it: workers that a server of this process starts would import everything anew.
    multiprocessing.set_start_method("fork", force=True)
    function(*arguments)


def _run_cases() -> None:
    from tests.helpers.strategy_runs import main

    main("cases.json", "results.json")


def _run_text(program: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, "")
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
