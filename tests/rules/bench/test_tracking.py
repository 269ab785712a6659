"""Runs tracked by Weights & Biases, read back from its offline folder."""

import subprocess
import sys

import pytest

from lightning_memfit.bench.tracking import Tracking
from tests.helpers.wandb_files import read_run

A_TRACKED_RUN = """
import sys
from lightning_memfit.bench.tracking import Tracker, Tracking

tracker = Tracker(Tracking("offline", "mine", "sweep-cpu", sys.argv[1]), "p1_b2", {"point": {"devices": 1}})
outcome = {"status": "ok", "predicted": {"allocated_bytes": 3}, "measured": {"allocated_bytes": 4}, "speed": None}
tracker.finish([{"step_seconds": 0.5}, {"step_seconds": 0.25}], outcome)
"""


def test_an_offline_run_holds_configuration_metrics_and_group(tmp_path):
    pytest.importorskip("wandb")
    # W&B's threads are kept out of this process, and at the end of theirs everything is on disk.
    subprocess.run([sys.executable, "-c", A_TRACKED_RUN, tmp_path], check=True, timeout=120)
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    run = read_run(folder)
    assert (run["project"], run["group"], run["name"]) == ("mine", "sweep-cpu", "p1_b2")
    assert run["config"]["point"] == {"devices": 1}
    assert run["config"]["predicted"] == {"allocated_bytes": 3}
    assert [step["step_seconds"] for step in run["history"]] == [0.5, 0.25]
    assert run["summary"]["predicted/allocated_bytes"] == 3
    assert run["summary"]["measured/allocated_bytes"] == 4
    assert run["summary"]["status"] == "ok"
    assert "speed" not in run["summary"]


def test_wandb_is_needed_only_where_runs_are_tracked(monkeypatch):
    monkeypatch.setattr("lightning_memfit.extras.find_spec", lambda name: None)
    Tracking("off", "p", "g", "f")
    with pytest.raises(
        ModuleNotFoundError, match=r'`--wandb offline` \(or .*\) needs wandb: pip install "lightning-memfit\[wandb\]"'
    ):
        Tracking("offline", "p", "g", "f")
