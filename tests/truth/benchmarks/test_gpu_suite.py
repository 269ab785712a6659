"""The suite that runs all GPU checks: order, time limits, going on where it stopped."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.estimator.cases import cuda_cases
from benchmarks.gpu import pages
from benchmarks.gpu.step_time import compared
from benchmarks.gpu.suite import ANSWERS, FIRST, PAGES, STEPS, Step, main, run_suite
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


def test_a_file_that_is_not_overwritten_is_removed_before_the_step_runs_again(tmp_path: Path) -> None:
    step = Step("plan", ("-c", "open('{folder}/plan.yaml', 'x')"), 30, writes="{folder}/plan.yaml")
    for again in (False, True):
        (row,) = run_suite((step,), tmp_path, minutes=1, again=again)
        assert row["status"] == "passed", row
    (tmp_path / "plan.yaml").unlink()
    run_suite((step,), tmp_path, minutes=1)
    assert (tmp_path / "plan.yaml").exists(), "a step that passed elsewhere is run where its file is not"


def test_what_is_asked_first_fits_into_the_time_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert [step.name for step in FIRST] == ["fork", "peers_speed"]
    assert FIRST[0].limit_s <= 60
    assert sum(step.limit_s for step in FIRST) <= 14 * 60
    assert main(["--dry-run"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [step.name for step in (*FIRST, *ANSWERS)]


def test_the_answers_take_twenty_minutes_at_most() -> None:
    together = max(step.limit_s for step in ANSWERS if not step.timed)
    assert together + sum(step.limit_s for step in ANSWERS if step.timed) <= 1200
    assert ANSWERS[0].name == "predictions"


@pytest.mark.nightly_cases(
    "bert_large", "fit_12gib", "fitter", "plan_12gib", "predictions", "step_time", "peers_speed", "fork", "doctor"
)
@pytest.mark.parametrize(
    "step", [step.on_cpu() for step in (*FIRST, *ANSWERS) if step.small], ids=lambda step: step.name
)
def test_every_answer_runs_at_a_small_scale(step: Step, shared_folder: Path) -> None:
    """In order, as `fit_12gib` trains by the plan that `plan_12gib` wrote."""
    (row,) = run_suite((step,), shared_folder, minutes=4)
    assert row["status"] == "passed", "\n".join(row["last_lines"])
    if step.name == "step_time":
        text = pages.step_time(json.loads((shared_folder / "step_time_cpu.json").read_text()))
        assert text.count("\n| gpt2-tiny") == 2
    if step.name == "fork":
        assert pages.fork(json.loads((shared_folder / "fork.json").read_text())).count(" | yes, ") == 7
    if step.name == "peers_speed":
        rows = list((shared_folder / "peers_speed_cpu_small").glob("*.json"))
        assert len(rows) == 28
    if step.name == "fitter":
        record = json.loads((shared_folder / "fitter_cpu.json").read_text())
        assert [row["fraction"] for row in record["rows"] if row["name"].endswith("memfit")] == [1.0]
        assert "perceptron, lightning_power | 1.00 MiB" in pages.fitter(record)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def test_steps_that_time_nothing_and_follow_each_other_run_together(tmp_path: Path) -> None:
    wait = (
        "import pathlib, time\npathlib.Path({me!r}).touch()\n"
        "while not pathlib.Path({other!r}).exists(): time.sleep(0.01)"
    )
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    steps = (
        Step("before", ("-c", f"import os; assert not os.path.exists({first!r})"), 30),
        Step("first", ("-c", wait.format(me=first, other=second)), 30, timed=False),
        Step("second", ("-c", wait.format(me=second, other=first)), 30, timed=False),
        Step("after", ("-c", f"import os; assert os.path.exists({second!r})"), 30),
    )
    assert {row["name"]: row["status"] for row in run_suite(steps, tmp_path, minutes=1)} == {
        "before": "passed",
        "first": "passed",
        "second": "passed",
        "after": "passed",
    }


def test_every_attention_kernel_of_the_cuda_cases_can_be_forced() -> None:
    from benchmarks.estimator.run import BACKENDS

    kernels = {case.kernel for case in cuda_cases()} - {""}
    assert "cudnn" in kernels
    assert kernels <= set(BACKENDS)
    names = [case.name for case in cuda_cases()]
    assert len(set(names)) == len(names) >= 40
    assert all("bert-large" in name for name in names[:8])


def test_step_times_are_corrected_by_the_other_runs_only() -> None:
    """A device that is three times slower than its data sheet, with one run that is off by itself."""
    parts = [{"arithmetic": 1.0, "memory": 0.1 * index} for index in range(1, 6)]
    rows = [
        {"name": str(index), "predicted": part, "seconds": 3 * sum(part.values())} for index, part in enumerate(parts)
    ]
    rows[-1]["seconds"] *= 2
    found = compared(rows)
    assert found["median_error"]["data sheet"] == pytest.approx(2 / 3)
    assert found["rows"][-1]["errors"]["corrected by the others"] == pytest.approx(-0.5, abs=0.01)
    assert found["largest_error"]["fitted"] < found["largest_error"]["data sheet"]


def test_the_page_says_how_steps_ended() -> None:
    assert "did not fit" in pages.fitter({"rows": [{"name": "a", "failed": "did not fit"}], **RECORD})
    ended = [{"name": "predictions", "status": "passed", "seconds": 9.2}]
    assert "- passed: predictions (9 s)." in pages.at_a_glance(ended, [], None)


def test_what_took_longer_than_its_peer_is_named() -> None:
    ours = {"name": "gpt2, memfit", "seconds": 12.8, "largest": 47}
    theirs = {"name": "gpt2, lightning_power", "seconds": 4.7, "largest": 32}
    broken = {"name": "gpt2, lightning_binsearch", "failed": "did not fit"}
    (line,) = pages.slower_searches([ours, theirs, broken])
    assert line.startswith("gpt2: 12.8 s, which found 47; lightning_power 4.7 s, which found 32. ")
    text = pages.at_a_glance([{"name": "fork", "status": "failed"}], [], {"rows": [ours, theirs]})
    assert text.startswith("- failed: fork (0 s).\n- not run: peers_speed, predictions, ")
    assert "- gpt2: 12.8 s" in text


def test_a_fork_that_said_nothing_is_told() -> None:
    text = pages.fork({"before_backward": {}, "largest_difference": 0.0, **RECORD})
    assert "| before backward | not reached | not reached | not reached | not reached |" in text


RECORD = {"hardware": {"device": "H200"}, "versions": {"torch": "2.11.0"}}


def test_commands_name_modules_that_exist() -> None:
    from importlib.util import find_spec

    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in (*STEPS, PAGES):
        if step.command[0] == "-c":
            compile(step.command[1], step.name, "exec")
            continue
        assert step.command[0] == "-m"
        assert find_spec(step.command[1]) is not None, step.command


def test_files_and_experiments_of_the_commands_exist() -> None:
    root = Path(__file__).parents[3]
    for step in STEPS:
        for option, value in pairwise(step.command):
            if option == "--config" and "{folder}" not in value:
                assert (root / value).is_file(), step
            if option == "--experiment":
                assert (root / f"benchmarks/experiments/{value}.yaml").is_file(), step


@pytest.mark.parametrize("step", [step for step in STEPS if "fit" in step.command], ids=lambda step: step.name)
def test_recipes_and_overlays_fit_each_other(step: Step, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plan.yaml", "plan_12gib.yaml"):
        (tmp_path / name).write_text("trainer: {accumulate_grad_batches: 1}\n")
    assert cli([*step.arguments(tmp_path)[2:], "--trainer.accelerator=cpu", "--print_config"]) == 0
    assert "max_steps: 5" in capsys.readouterr().out
