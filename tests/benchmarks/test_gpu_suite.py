"""The suite that runs all GPU checks: order, time limits, going on where it stopped."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.gpu.suite import STEPS, Step, main, run_suite
from cli.main import main as cli


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


def test_a_dry_run_lists_every_step_and_runs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path / "out"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [step.name for step in STEPS]
    assert f"--out {tmp_path}/out/plan.yaml" in "\n".join(lines)
    assert not (tmp_path / "out").exists()


def test_files_and_experiments_of_the_commands_exist() -> None:
    root = Path(__file__).parents[2]
    for step in STEPS:
        for option, value in pairwise(step.command):
            if option == "--config" and "{folder}" not in value:
                assert (root / value).is_file(), step
            if option == "--experiment":
                assert (root / f"benchmarks/experiments/{value}.yaml").is_file(), step


@pytest.mark.slow
@pytest.mark.parametrize("step", [step for step in STEPS if "fit" in step.command], ids=lambda step: step.name)
def test_recipes_and_overlays_fit_each_other(step: Step, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.yaml").write_text("trainer: {accumulate_grad_batches: 1}\n")
    assert cli([*step.arguments(tmp_path)[2:], "--trainer.accelerator=cpu", "--print_config"]) == 0
    assert "max_steps: 5" in capsys.readouterr().out
