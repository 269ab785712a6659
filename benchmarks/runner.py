"""The runner of all benchmarks: arguments, processes, going on where a run stopped, and the file of results.

A benchmark says what its cases are and what is done with one of them. Each case has processes of its own, so that the
memory of one doesn't touch another's, and that one which dies or hangs is a row. Files of results hold `rows`, each
with a `name`, and what the figures depend on: command, versions, hardware and commit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.text import RESULTS
from lightning_memfit.bench import record
from lightning_memfit.measure.report import versions

Row = dict[str, Any]
Options = argparse.Namespace
"""What the command line says, with `folder`, which all cases of a run share, and `found`, what `describe` said."""


@dataclass(frozen=True)
class Named:
    """A case: its name, and what it is made of."""

    name: str
    of: Any = None


def named(names: Iterable[str]) -> list[Named]:
    """A case of each name."""
    return [Named(name) for name in names]


@dataclass(frozen=True)
class Stage:
    """What is done with every case before the next stage begins."""

    function: Callable[..., Row]
    """Called with case, options and the row so far, in a forked process; returns what is added to the row."""
    timed: bool = True
    """Whether nothing may run beside it; else `--processes` cases do at a time."""
    size: Callable[[Row], float] | None = None
    """Of what cases at a time share, what one takes; together they take `found["room"]` at most."""
    kept: bool = False
    """Whether rows are written that no later stage has completed."""


def _rows_alone(rows: list[Row], options: Options) -> Row:
    return {"rows": rows}


@dataclass(frozen=True)
class Benchmark:
    """What one benchmark measures."""

    result: str
    """Its file in `benchmarks/results`, in which `{device}` stands for that of the run."""
    cases: Callable[[Options], Iterable[Any]]
    """All cases, each of which has a `name`."""
    stages: tuple[Stage, ...]
    figures: Callable[[list[Row], Options], Row] = _rows_alone
    """Everything in the file, of its rows."""
    say: Callable[[Row], str] = str
    """A row in a line."""
    _: KW_ONLY
    describe: Callable[[Options], Row] | None = None
    """What cases are to know of the machine, found in a process that ends: one with a CUDA context can't be forked."""
    seconds: float = 600.0
    """After which a case is killed, by default."""
    threads: int | None = 1
    arguments: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Its own arguments."""


DEVICE = ("--device", {"choices": ("cpu", "cuda"), "default": "cpu"})
SMALL = ("--small", {"action": "store_true", "help": "a few small cases, to see that it runs"})


def command(benchmark: Benchmark, name: str, description: str, argv: Sequence[str]) -> int:
    """Run a benchmark as the command line says, and return the exit code: 1 if a case failed, or none was run."""
    options = _parser(benchmark, name, description).parse_args(argv)
    device = vars(options).setdefault("device", "cpu")
    output = options.output or RESULTS / benchmark.result.format(device=device)
    before = read_rows(output) if options.names or options.go_on or options.predict else []
    known = {row["name"]: row for row in before}
    if benchmark.threads is not None and device == "cpu":
        torch.set_num_threads(benchmark.threads)
    with tempfile.TemporaryDirectory() as folder:
        options.folder, options.found = Path(folder), {}
        everything = {case.name: case for case in benchmark.cases(options)}
        chosen = list(_chosen(everything, options.names))
        if options.predict:
            chosen = [case for case in chosen if case.name in known]
        todo = [case for case in chosen if not (options.go_on and "failed" not in known.get(case.name, FAILED))]
        failed = False
        for row in run(benchmark, todo, options, known if options.predict else {}):
            print(f"{row['name']}: {row['failed'] if 'failed' in row else benchmark.say(row)}", flush=True)
            if not (options.predict and "failed" in row):  # what was measured stays
                known[row["name"]] = row
            rows = [known[name] for name in everything if name in known]
            write(output, benchmark.figures(rows, options), aside=True)
            failed |= "failed" in row
    return int(failed or not chosen or any("failed" in known.get(case.name, FAILED) for case in chosen))


FAILED: Row = {"failed": "not run"}


def run(benchmark: Benchmark, cases: Sequence[Any], options: Options, known: dict[str, Row]) -> Iterator[Row]:
    """Rows of cases, as they end.

    Args:
        benchmark: Whose cases they are.
        cases: What is run.
        options: Of the command.
        known: Rows to which the first stage alone adds anew; empty to run all stages.
    """
    until, left = time.monotonic() + options.until, {case.name: (case, known.get(case.name, {})) for case in cases}
    if benchmark.describe is not None and cases:
        found = in_a_process(_described, Named("device"), benchmark.describe, options, seconds=options.seconds)
        if "failed" in found:
            yield from ({"name": case.name, "failed": found["failed"]} for case in cases)
            return
        options.found = found["found"]
    stages = benchmark.stages[:1] if known else benchmark.stages
    for stage in stages:
        is_last = stage is stages[-1]
        jobs = [
            Job(_added, case, (stage.function, options, row), stage.size(row) if stage.size else 0.0)
            for case, row in left.values()
        ]
        at_once = 1 if stage.timed else options.processes
        room = options.found.get("room", float("inf"))
        for row in rows_of(jobs, options.seconds, at_once, room, until):
            case, _ = left.pop(row["name"])
            if "failed" not in row and not is_last:
                left[row["name"]] = case, row
            if "failed" in row or is_last or stage.kept:
                yield row
        if until <= time.monotonic():
            return


def _described(named: Named, describe: Callable[[Options], Row], options: Options) -> Row:
    return {"name": named.name, "found": describe(options)}


def _added(case: Any, function: Callable[..., Row], options: Options, row: Row) -> Row:
    return {"name": case.name, **row, **function(case, options, row)}


def _chosen(cases: dict[str, Any], names: Sequence[str]) -> Iterator[Any]:
    """Cases of these names, or where there is none of a name, those whose names contain it; all without names."""
    for name, case in cases.items():
        if not names or any(name == one or (one in name and one not in cases) for one in names):
            yield case


def _parser(benchmark: Benchmark, name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="names of cases, or parts of them; rows of all others stay")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="run what has no good row yet")
    parser.add_argument("--predict", action="store_true", help="renew predictions alone, beside what was measured")
    parser.add_argument("--processes", type=int, default=1, help="cases at a time, where nothing is timed (default: 1)")
    parser.add_argument(
        "--seconds", type=float, default=benchmark.seconds, help="a case that takes longer is killed (%(default)s)"
    )
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no case is started")
    parser.add_argument("--output", type=Path, help=f"default: benchmarks/results/{benchmark.result}")
    for own, given in benchmark.arguments:
        parser.add_argument(own, **given)
    return parser


# --- files ------------------------------------------------------------------------------------------------------------


def write(path: Path, figures: dict[str, Any], aside: bool = False) -> None:
    """Write one JSON file: figures, versions, hardware and commit.

    Args:
        path: The file.
        figures: What was measured.
        aside: Whether to do so in a process that ends, as asking a device for its name leaves a context.
    """
    if aside:
        process = multiprocessing.get_context("fork").Process(target=write, args=(path, figures))
        process.start()
        process.join()
        return
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name.removesuffix('.__main__')}" if module else Path(sys.argv[0]).name
    document = {
        "command": " ".join([program, *sys.argv[1:]]),
        "versions": versions(),
        "hardware": {
            **record.hardware(""),
            "cpu": _processor(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "threads": torch.get_num_threads(),
        "commit": record.commit(),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return models[0].partition(":")[2].strip() if models else platform.processor()


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


def read_rows(path: Path) -> list[Row]:
    """Rows of a file of `write`; none where there is no file."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return rows


# --- processes --------------------------------------------------------------------------------------------------------


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
    seconds: float
    process: ForkProcess = field(init=False)
    receive: Connection = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.receive, send = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(send, self.job))
        self.process.start()
        send.close()  # the child's is then the only one, so that its death ends the wait
        self.ends = time.monotonic() + self.seconds

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
            running.append(_Running(waiting.pop(0), seconds))
        if not running:
            return
        ends = min(one.ends for one in running)
        wait([one.receive for one in running], None if ends == float("inf") else max(0.0, ends - time.monotonic()))
        for one in list(running):
            if (row := one.row()) is not None:
                running.remove(one)
                yield row


def in_a_process(function: Callable[..., Row], case: Any, *arguments: Any, seconds: float) -> Row:
    """The row of one case; see `Job`, and `seconds` of `rows_of`."""
    (row,) = rows_of([Job(function, case, arguments)], seconds)
    return row


def _child(connection: Connection, job: Job) -> None:
    torch.manual_seed(0)
    try:
        connection.send(job.function(job.case, *job.arguments))
    except BaseException as error:
        connection.send({"name": job.case.name, "failed": f"{type(error).__name__}: {error}"[:500]})
        traceback.print_exc()
