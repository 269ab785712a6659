"""Cases run in processes of their own, their rows are kept, and a run goes on where it stopped."""

import json
import os
import signal
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import MODULES, benchmark_of, main
from benchmarks.runner import Benchmark, Job, Stage, command, in_a_process, named, rows_of


class Named:
    """What `in_a_process` asks of a case."""

    name = "case"


@pytest.mark.parametrize(
    ("function", "failed"),
    [
        (lambda case: os._exit(7), "its process ended with exit code 7"),
        (lambda case: os.kill(os.getpid(), signal.SIGKILL), "its process ended with exit code -9"),
        (lambda case: time.sleep(60), "was killed after 1 s"),
        (lambda case: {}["absent"], "KeyError: 'absent'"),
    ],
)
def test_a_case_that_dies_or_hangs_is_a_row(function: Any, failed: str) -> None:
    started = time.monotonic()
    assert in_a_process(function, Named, seconds=1) == {"name": "case", "failed": failed}
    assert time.monotonic() - started < 30


def _waits(case: Any, folder: Path, beside: int) -> dict[str, Any]:
    """A row once so many cases run at a time."""
    (folder / case.name).touch()
    ends = time.monotonic() + 20
    while len(list(folder.iterdir())) < beside and time.monotonic() < ends:
        time.sleep(0.01)
    seen = len(list(folder.iterdir()))
    time.sleep(0.1)
    (folder / case.name).unlink()
    return {"name": case.name, "seen": seen}


class Numbered(Named):
    """One case of several."""

    def __init__(self, number: int) -> None:
        self.name = str(number)


def test_jobs_run_at_once_as_far_as_there_is_room(tmp_path: Path) -> None:
    def seen(size: float, beside: int) -> list[int]:
        jobs = [Job(_waits, Numbered(index), (tmp_path, beside), size) for index in range(4)]
        rows = list(rows_of(jobs, 30, at_once=2, room=10))
        assert sorted(row["name"] for row in rows) == ["0", "1", "2", "3"], rows
        return [row["seen"] for row in rows]

    assert seen(size=4, beside=2)[0] == 2
    assert seen(size=6, beside=1) == [1, 1, 1, 1], "each takes more than half of the room"
    assert seen(size=11, beside=1) == [1, 1, 1, 1], "each takes more than all of the room"
    assert list(rows_of([Job(_waits, Named)], 30, until=time.monotonic())) == []


# --- a benchmark ------------------------------------------------------------------------------------------------------


def predict(case: Any, options: Namespace, row: dict[str, Any]) -> dict[str, Any]:
    """A prediction that differs each time, and none of `bad` without a file beside the output."""
    seen = options.output.with_name(f"{case.name}.seen")
    seen.open("a").write("x")
    if case.name == "bad" and not options.output.with_name("mended").exists():
        raise RuntimeError("no device")
    return {"predicted": len(seen.read_text())}


def measure(case: Any, options: Namespace, row: dict[str, Any]) -> dict[str, Any]:
    return {"measured": row["predicted"] + 10}


MADE = Benchmark(
    "none.json",
    lambda options: named(["good", "goodness", "bad"]),
    (Stage(predict, timed=False), Stage(measure)),
    lambda rows, options: {"number": len(rows), "rows": rows},
)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "rows.json"
        code = command(MADE, "made", "", [*arguments, "--output", str(output)])
        rows = json.loads(output.read_text())["rows"] if output.exists() else []
        return code, {row["name"]: row.get("failed") or (row["predicted"], row["measured"]) for row in rows}

    return run


def test_a_row_that_failed_is_kept_and_run_again(run: Any, tmp_path: Path) -> None:
    assert run() == (1, {"good": (1, 11), "goodness": (1, 11), "bad": "RuntimeError: no device"})
    (tmp_path / "mended").touch()
    assert run("--continue") == (0, {"good": (1, 11), "goodness": (1, 11), "bad": (2, 12)})
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["number"] == 3
    assert {"command", "versions", "commit"} <= set(document)


def test_names_choose_cases_and_the_others_stay(run: Any) -> None:
    assert run("good") == (0, {"good": (1, 11)})
    assert run("ness") == (0, {"good": (1, 11), "goodness": (1, 11)})
    assert run("no such case")[0] == 1


def test_predictions_are_renewed_beside_what_was_measured(run: Any) -> None:
    run("good", "goodness")
    assert run("--predict") == (0, {"good": (2, 11), "goodness": (2, 11)})


def test_no_case_is_started_when_time_is_up(run: Any) -> None:
    assert run("--until", "0") == (1, {})


@pytest.mark.parametrize("name", MODULES)
def test_every_name_is_that_of_a_benchmark(name: str) -> None:
    benchmark, description = benchmark_of(name)
    options = Namespace(device="cpu", small=False, output=None)
    names = [case.name for case in benchmark.cases(options)]
    assert len(set(names)) == len(names) > 0
    assert description


def test_without_a_name_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert all(f"\n{name} " in capsys.readouterr().out for name in list(MODULES)[:1])
