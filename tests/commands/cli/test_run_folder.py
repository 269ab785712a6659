"""One new folder per run, whatever the logger is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cli.main import main
from cli.run_folder import _is_first

_DEMOS = "lightning.pytorch.demos.boring_classes"
_REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "limit_val_batches": 0}
    trainer |= {"enable_progress_bar": False, "enable_model_summary": False}
    content = {"model": f"{_DEMOS}.BoringModel", "data": f"{_DEMOS}.BoringDataModule", "trainer": trainer}
    Path("recipe.yaml").write_text(yaml.safe_dump(content))
    return "recipe.yaml"


def logger(kind, /, **options):
    return {"class_path": f"lightning.pytorch.loggers.{kind}", "init_args": options}


def fit(recipe, logger=None, *more):
    Path("logger.yaml").write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
    return main(["fit", "--config", recipe, "--config", "logger.yaml", *more])


def folders(parent):
    return sorted(path.name for path in Path(parent).iterdir())


@pytest.mark.nightly
def test_weights_and_biases_twice(recipe, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    offline = logger("WandbLogger", project="mine", save_dir="runs", offline=True)
    wandb = pytest.importorskip("wandb")
    for _ in range(2):
        assert fit(recipe, offline) == 0
        wandb.finish()
    assert fit(recipe, [logger("CSVLogger", save_dir="both"), offline]) == 0
    wandb.finish()
    assert {"checkpoints", "config.yaml"} <= set(folders("both/lightning_logs/version_0"))
    assert folders("runs/mine") == ["version_0", "version_1"]
    for run in Path("runs/mine").iterdir():
        assert folders(run) == ["checkpoints", "config.yaml"]


@pytest.mark.parametrize(
    ("chosen", "parent"),
    [
        (False, "lightning_logs"),
        (logger("CSVLogger", save_dir="runs", name="mine"), "runs/mine"),
        ([logger("CSVLogger", save_dir="runs"), logger("CSVLogger", save_dir="more")], "runs/lightning_logs"),
    ],
)
def test_two_runs_have_two_folders(recipe, chosen, parent):
    assert fit(recipe, chosen) == fit(recipe, chosen) == 0
    assert folders(parent) == ["version_0", "version_1"]
    for run in Path(parent).iterdir():
        assert {"checkpoints", "config.yaml"} <= set(folders(run))
    assert not Path("config.yaml").exists()
    assert not Path("checkpoints").exists()


def test_a_version_of_the_user_is_not_overwritten(recipe, capsys):
    named = logger("CSVLogger", save_dir="runs", version="best")
    assert fit(recipe, named) == 0
    saved = Path("runs/lightning_logs/best/config.yaml")
    before = saved.read_text()
    assert fit(recipe, named) == 2
    assert "to NOT exist" in capsys.readouterr().err
    assert saved.read_text() == before


@pytest.mark.parametrize("name", ["NODE_RANK", "GROUP_RANK"])
def test_only_the_first_machine_makes_the_folder(name, monkeypatch):
    """Lightning's own launcher, started on each machine, has no rank yet when the folder is made."""
    for other in ("NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(other, raising=False)  # which launchers leave behind
    monkeypatch.setenv(name, "1")
    assert not _is_first(2)
    assert _is_first(1)  # left over from another job
    monkeypatch.setenv(name, "0")
    assert _is_first(2)


@pytest.mark.nightly
def test_ranks_that_torchrun_starts_share_the_first_one_s_folder(recipe):
    Path("logger.yaml").write_text(yaml.safe_dump({"trainer": {"logger": False, "devices": 2, "strategy": "ddp"}}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    finished = subprocess.run(
        [*torchrun, "-m", "cli", "fit", "--config", recipe, "--config", "logger.yaml"],
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert folders("lightning_logs") == ["version_0"]
    assert folders("lightning_logs/version_0") == ["checkpoints", "config.yaml"]
