"""Rows run in processes of their own; whatever these do, a whole record remains."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from lightning_memfit.bench.experiment import Measurement, Row
from lightning_memfit.bench.runner import Runner

WORKER = """
import json, os, pathlib, subprocess, sys, time, yaml
folder = pathlib.Path(sys.argv[1])
settings = yaml.safe_load((folder / "settings.yaml").read_text())
with open(settings["log"], "a") as log:
    log.write(settings["name"] + chr(10))
print("from the worker", settings["name"])
if settings["does"] == "sleep":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pathlib.Path(settings["log"] + ".child").write_text(str(child.pid))
    time.sleep(60)
if settings["does"] == "failed by a typo":
    print("memfit: error: `model`: there is no argument `x`. Closest: y.")
if settings["does"] == "die":
    os.kill(os.getpid(), 9)
if settings["does"] == "exit":
    sys.exit(3)
outcome = {"status": settings["does"].split()[0], "loss_first": 1.0, "hardware": {"device": "toy"}}
if outcome["status"] != "ok":
    outcome["error"] = {"type": "SystemExit" if "typo" in settings["does"] else "E", "message": "2"}
(folder / "outcome.json").write_text(json.dumps(outcome))
if settings["does"] == "failed because of another":
    said = {"status": "out_of_memory", "error": {"type": "OutOfMemoryError", "message": "of rank 1"}}
    (folder / "outcome_1.json").write_text(json.dumps(said))
"""


def _forked(argv: list[str]) -> int:
    """The worker in a fork, which has no arguments of its own."""
    sys.argv[1:] = argv
    exec(WORKER, {})
    return 0


@pytest.fixture(params=["process", "fork"])
def make(tmp_path, request):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    command = (sys.executable, str(worker) if request.param == "process" else "no such worker")
    runner = Runner(
        "mine",
        "small",
        "cpu",
        tmp_path / "out",
        command,
        lambda row: f"run {row}",
        "a note",
        forked=_forked if request.param == "fork" else None,
    )

    def row(name: str, does: str = "ok", timeout_s: float = 30.0) -> Row:
        settings = {"name": name, "does": does, "log": str(tmp_path / "log")}
        return Row(name, f"title of {name}", settings, Measurement(timeout_s=timeout_s))

    return runner, row, lambda: (tmp_path / "log").read_text().split()


def test_records_say_what_ran_where(make):
    runner, row, _ = make
    [result] = runner.run([row("a")])
    assert json.loads((runner.folder / "a.json").read_text()) == result.to_dict()
    assert (result.status, result.command, result.hardware["device"]) == ("ok", "run a", "toy")
    assert result.hardware["notes"] == "a note"
    assert result.versions["torch"]


def test_finished_rows_are_kept_until_they_change_or_repeat(make):
    runner, row, ran = make
    seen: list[tuple[str, bool]] = []
    rows = [row("a"), row("b", "out_of_memory"), row("c", "failed")]
    runner.run(rows)
    runner.run(rows, on_result=lambda result, new: seen.append((result.row, new)))
    assert seen == [("a", False), ("b", False), ("c", True)]
    runner.run([row("a", "out_of_memory")])  # other settings
    runner.run([row("b", "out_of_memory")], repeat=True)
    assert ran() == ["a", "b", "c", "c", "a", "b"]


def test_a_row_that_takes_too_long_is_ended_with_its_children(make, tmp_path):
    runner, row, _ = make
    started = time.monotonic()
    [result] = runner.run([row("a", "sleep", timeout_s=3.0)])
    assert time.monotonic() - started < 20
    assert (result.status, result.error.type) == ("failed", "Timeout")
    assert "`measure.timeout_s` = 3 s" in result.error.message
    assert "from the worker a" in result.error.log_tail or result.error.log_tail == ""
    child = int((tmp_path / "log.child").read_text())
    _until(lambda: not _alive(child), seconds=5)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("does", "kind", "message"), [("die", "Killed", "SIGKILL"), ("exit", "Ended", "code 3")])
def test_a_process_that_ends_without_a_result(make, does, kind, message):
    runner, row, _ = make
    [result] = runner.run([row("a", does)])
    assert (result.status, result.error.type) == ("failed", kind)
    assert message in result.error.message


def test_a_run_is_out_of_memory_when_one_of_its_processes_is(make):
    runner, row, _ = make
    [result] = runner.run([row("a", "failed because of another")])
    assert (result.status, result.error.message) == ("out_of_memory", "of rank 1")
    assert result.loss_first == 1.0  # of the first process


def test_an_interrupt_leaves_what_was_finished_and_no_process(make, monkeypatch):
    runner, row, _ = make
    ended: list[int] = []
    killpg = os.killpg

    def interrupted(result, new):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "killpg", lambda pid, number: (ended.append(pid), killpg(pid, number)))
    with pytest.raises(KeyboardInterrupt):
        runner.run([row("a"), row("b")], on_result=interrupted)
    assert [path.name for path in runner.folder.iterdir()] == ["a.json"]
    assert len(ended) == 1


def _until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
