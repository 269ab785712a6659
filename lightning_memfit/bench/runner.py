"""`run_rows`: measure rows one after the other, each in a process of its own, and write a record of each."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_memfit.bench.experiment import Row
from lightning_memfit.bench.record import NESTED, SCHEMA, Result, commit, hardware, read_result
from lightning_memfit.bench.tracking import Tracking
from lightning_memfit.measure.report import versions

_LOG_LINES = 20
_EXPLAINED = "memfit: error: "
_OF_ROW = ("title", "key", "settings", "reference", "point", "group", "peer", "options")


@dataclass(frozen=True)
class Runner:
    """Measures the rows of an experiment; holds what all of them have in common."""

    experiment: str
    scale: str
    device: str
    folder: Path
    """Folder for the records, one file per row."""
    worker: tuple[str, ...]
    """Command that measures one row: given a folder with `settings.yaml` and `job.json`, it writes `outcome.json`
    there."""
    command: Callable[[str], str]
    """Returns the command line that repeats a row."""
    notes: str = ""
    tracking: Tracking | None = None
    """Weights & Biases project to log to, if any."""
    forked: Callable[[list[str]], int] | None = None
    """Measures one row like `worker`, given the arguments of its command, in a fork of this process: rows on one device
    save the time of imports. This process must not have used an accelerator."""

    def path(self, row: Row) -> Path:
        """Return the file for a row's record."""
        return self.folder / f"{row.name}.json"

    def finished(self, row: Row) -> Result | None:
        """Return the record of a row if it was measured with exactly the same settings and did not fail."""
        try:
            result = read_result(self.path(row))
        except (OSError, ValueError, TypeError):
            return None
        return result if result.key == row.key and result.status != "failed" else None

    def known(self, rows: Iterable[Row]) -> list[Result]:
        """Return the records of those rows that are finished."""
        return [result for row in rows if (result := self.finished(row)) is not None]

    def run(
        self, rows: Iterable[Row], repeat: bool = False, on_result: Callable[[Result, bool], None] | None = None
    ) -> list[Result]:
        """Measure the rows that are not finished."""
        results = []
        for row in rows:
            kept = None if repeat else self.finished(row)
            result = kept or self._measure(row)
            if kept is None:
                result.write(self.path(row))
            results.append(result)
            if on_result is not None:
                on_result(result, kept is None)
        return results

    def _measure(self, row: Row) -> Result:
        started, clock = datetime.now(timezone.utc), time.perf_counter()
        facts: dict[str, Any] = {"versions": versions(), "hardware": hardware(self.notes), "commit": commit()}
        with tempfile.TemporaryDirectory(prefix="memfit-bench-") as name:
            outcome = self._run_worker(Path(name), row)
        facts["hardware"].update(outcome.pop("hardware", {}))
        made = {key: kind(**outcome.pop(key)) for key, kind in NESTED.items() if outcome.get(key)}
        return Result(
            schema=SCHEMA,
            experiment=self.experiment,
            row=row.name,
            scale=self.scale,
            device=self.device,
            command=self.command(row.name),
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - clock, 2),
            **{name: getattr(row, name) for name in _OF_ROW},
            **facts,
            **{**outcome, **made},
        )

    def _run_worker(self, folder: Path, row: Row) -> dict[str, Any]:
        """Return the worker's outcome, or what is known about its end if it wrote none."""
        (folder / "settings.yaml").write_text(yaml.safe_dump(row.settings, sort_keys=False), encoding="utf-8")
        tracking = asdict(self.tracking) if self.tracking is not None and self.tracking.mode != "off" else None
        (folder / "job.json").write_text(json.dumps(job_of(row, tracking)), encoding="utf-8")
        log = folder / "log.txt"
        with log.open("wb") as file:
            code = _wait(self._start(folder, row, file), row.measurement.timeout_s)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_LOG_LINES:])
        said = _combined(folder)
        if said is None:
            return _no_outcome(code, row.measurement.timeout_s, tail)
        if said["status"] == "failed":
            said["error"]["log_tail"] = tail
            explained = [line for line in lines if line.startswith(_EXPLAINED)]
            if said["error"]["type"] == "SystemExit" and explained:  # the parser refused the configuration
                said["error"] |= {"type": "Configuration", "message": explained[-1].removeprefix(_EXPLAINED)}
        return said

    def _start(self, folder: Path, row: Row, log: Any) -> Callable[[], "subprocess.Popen[bytes] | _Fork"]:
        # Ranks of several devices are made by starting the worker's command again.
        if self.forked is not None and row.settings.get("trainer", {}).get("devices", 1) == 1:
            return partial(_Fork, self.forked, [str(folder)], log)
        command = [*self.worker, str(folder)]
        return lambda: subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def job_of(row: Row, tracking: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a worker is told about a row beside its settings, as plain data."""
    return {
        "row": row.name,
        "point": row.point,
        "warmup_steps": row.measurement.untimed_steps,
        "tracking": tracking,
        "peer": row.peer,
        "options": row.options,
    }


def _combined(folder: Path) -> dict[str, Any] | None:
    """Return the first process's outcome, with the error of the process that ran out of memory if there is one.

    When one process runs out of memory, all others fail because it is gone.
    """
    files = (folder / "outcome.json", *sorted(folder.glob("outcome_*.json")))
    outcomes = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    if not outcomes:
        return None
    cause = next((outcome for outcome in outcomes if outcome["status"] == "out_of_memory"), outcomes[0])
    return {**outcomes[0], "status": cause["status"], "error": cause.get("error")}


def _no_outcome(code: int | None, timeout_s: float, tail: str) -> dict[str, Any]:
    if code is None:
        return _failed("Timeout", f"not finished within `measure.timeout_s` = {timeout_s:g} s.", tail)
    if sys.platform != "win32" and code == -signal.SIGKILL:
        message = "the process was killed (SIGKILL), as the kernel does when host memory runs out."
        return _failed("Killed", message, tail)
    return _failed("Ended", f"the process ended with code {code} and without a result.", tail)


def _failed(kind: str, message: str, tail: str) -> dict[str, Any]:
    return {"status": "failed", "error": {"type": kind, "message": message, "log_tail": tail}}


class _Fork:
    """A function in a fork of this process, with what is used here of `subprocess.Popen`."""

    def __init__(self, function: Callable[[list[str]], int], argv: list[str], log: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._run, args=(function, argv, log.fileno()))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @staticmethod
    def _run(function: Callable[[list[str]], int], argv: list[str], log: int) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)  # whatever they were
        sys.exit(function(argv))

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _wait(start: "Callable[[], subprocess.Popen[bytes] | _Fork]", timeout_s: float) -> int | None:
    """Return the exit code of what is started, or None if it took too long. It and its children have ended by then."""
    with _termination_as_exit():
        process = start()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process)


@contextlib.contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind this program: the worker has a session of its own and would outlive it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_group(process: "subprocess.Popen[bytes] | _Fork") -> None:
    """End the whole session of a process; with several devices it has child processes."""
    if sys.platform == "win32":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
