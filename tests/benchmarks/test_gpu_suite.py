"""The suite that runs all GPU checks: order, time limits, going on where it stopped."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.suite import STEPS, Step, main, run_suite


def _step(name: str, code: str, limit_s: float = 30) -> Step:
    return Step(name, ("-c", code), limit_s)


def test_steps_run_in_order_and_say_how_they_ended(tmp_path: Path) -> None:
    steps = (_step("good", "print('fine')"), _step("bad", "raise SystemExit('broken')"))
    rows = run_suite(steps, tmp_path, minutes=1)
    assert [(row["name"], row["status"]) for row in rows] == [("good", "passed"), ("bad", "failed")]
    assert (tmp_path / "good.log").read_text() == "fine\n"
    assert rows[1]["last_lines"] == ["broken"]
    assert json.loads((tmp_path / "suite.json").read_text()) == rows


def test_what_passed_is_not_run_again(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    count = f"open({str(marks)!r}, 'a').write('x')"
    steps = (_step("good", count), _step("bad", f"{count}; raise SystemExit(1)"))
    run_suite(steps, tmp_path, minutes=1)
    run_suite(steps, tmp_path, minutes=1)
    assert marks.read_text() == "xxx"
    run_suite(steps[:1], tmp_path, minutes=1, again=True)
    assert marks.read_text() == "xxxx"


def test_a_step_is_stopped_at_its_limit(tmp_path: Path) -> None:
    (row,) = run_suite((_step("slow", "import time; time.sleep(60)", 0.5),), tmp_path, minutes=1)
    assert row["status"] == "out of time"
    assert row["seconds"] < 30


def test_no_step_is_started_when_the_time_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run_suite((_step("good", ""),), tmp_path, minutes=0)
    assert row["status"] == "not run"
    assert "run the suite again" in capsys.readouterr().out


def test_the_exit_code_says_whether_all_passed(tmp_path: Path) -> None:
    assert main(["--folder", str(tmp_path)], (_step("good", ""),)) == 0
    assert main(["--folder", str(tmp_path)], (_step("good", ""), _step("bad", "raise SystemExit(3)"))) == 1


def test_commands_name_modules_that_exist() -> None:
    from importlib.util import find_spec

    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert step.command[0] == "-m"
        assert find_spec(step.command[1]) is not None, step.command
