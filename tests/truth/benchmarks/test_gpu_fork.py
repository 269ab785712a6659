"""The program that asks whether forks of a training process can trace, on the CPU and with children that misbehave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.fork import ask_fork

ROOT = Path(__file__).parents[3]


def test_a_fork_traces_on_the_cpu_and_the_parent_trains_on(tmp_path: Path) -> None:
    output = tmp_path / "fork.json"
    command = [sys.executable, "-m", "benchmarks.gpu.fork", "--device", "cpu", "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["works"]
    assert found["largest_difference"] == 0
    for moment in ("before_backward", "after_backward"):
        assert found[moment]["answered"]
        assert found[moment]["fake step"]["result"] == 5, "gradients of all parameters"
        assert found[moment]["profile"]["result"] == found["before_backward"]["profile"]["result"] > 0


def test_a_child_that_hangs_is_killed_and_says_where() -> None:
    started = time.monotonic()
    found = ask_fork(lambda: time.sleep(60) or {}, 0.3)
    assert time.monotonic() - started < 10
    assert not found["answered"]
    assert "test_gpu_fork.py" in "".join(found["stack"])


def test_a_child_that_dies_gives_its_exit_code() -> None:
    found = ask_fork(lambda: os._exit(7), 30)
    assert (found["answered"], found["exit_code"]) == (False, 7)
    assert found["seconds"] < 10
