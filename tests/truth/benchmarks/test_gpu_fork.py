"""The program that asks whether forks of a training process can trace, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.fork import PARTS

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
def test_forks_trace_on_the_cpu_and_the_parent_trains_on(tmp_path: Path) -> None:
    output = tmp_path / "fork.json"
    command = [sys.executable, "-m", "benchmarks.gpu.fork", "--device", "cpu", "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["works"]
    assert found["largest_difference"] == 0
    before, after = found["before_backward"], found["after_backward"]
    assert before["backward"]["result"] == after["backward"]["result"] == [2, 2, 2]
    flops = {moment[part]["result"] for moment in (before, after) for part in PARTS[1:] if part in moment}
    assert len(flops) == 1
    assert flops.pop() > 0
