"""Start `tests.helpers.strategy_runs` as a user would, and collect what it found."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 420


def launch(folder: Path, cases: dict[str, dict[str, Any]], *command: str) -> dict[str, Any]:
    """Run cases in one process per rank; those of a failed or hanging run are killed together.

    Args:
        folder: Where files are put, and the working directory.
        cases: See `strategy_runs`; with more than one device, Lightning starts the other processes.
        command: What stands in place of the plain interpreter, such as torchrun with its options.
    """
    return finish(folder, start(folder, cases, *command))


def start(folder: Path, cases: dict[str, dict[str, Any]], *command: str) -> subprocess.Popen:
    """Start a run without waiting for it."""
    (folder / "cases.json").write_text(json.dumps(cases))
    python = command or (sys.executable,)
    arguments = [*python, "-m", "tests.helpers.strategy_runs", str(folder / "cases.json"), str(folder / "results.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT", "MASTER_ADDR", "PL_GLOBAL_SEED"):
        environment.pop(name, None)
    log = (folder / "log.txt").open("w")
    return subprocess.Popen(arguments, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)


def finish(folder: Path, *processes: subprocess.Popen) -> dict[str, Any]:
    """Wait for processes of one run, and read its results."""
    try:
        codes = [process.wait(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert codes == [0] * len(codes), (folder / "log.txt").read_text()[-6000:]
    return json.loads((folder / "results.json").read_text())
