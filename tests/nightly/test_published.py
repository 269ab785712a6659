"""Published modules keep the verdicts of the committed table."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-published" / "bin" / "python"


@pytest.mark.timeout(7200)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment that `make published` installs")
def test_verdicts_on_published_modules_are_those_of_the_table() -> None:
    found = subprocess.run(
        [PYTHON, "-m", "tests.published"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, (
        f"run `python -m tests.published --write`, and see what moved:\n{found.stdout}{found.stderr}"
    )
