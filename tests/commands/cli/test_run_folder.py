"""One new folder per run, whatever the logger is."""

import os
import subprocess
import sys
from pathlib import Path

import fsspec
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


def test_a_logger_of_the_users_own_class_says_where(recipe, monkeypatch):
    Path("own_loggers.py").write_text(
        "from lightning.pytorch.loggers import CSVLogger\n"
        "class Fixed(CSVLogger):\n"
        "    def __init__(self, **options):\n"
        "        super().__init__('runs', name='r', **options)\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    chosen = {"class_path": "own_loggers.Fixed"}
    assert fit(recipe, chosen) == fit(recipe, chosen) == 0
    assert folders("runs/r") == ["version_0", "version_1"]
    for run in Path("runs/r").iterdir():
        assert {"checkpoints", "config.yaml"} <= set(folders(run))


@pytest.mark.nightly
def test_what_forked_ranks_wrote_stays_when_they_fail(recipe):
    """Their steps aren't seen by the process that started them."""
    Path("breaking.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Breaks(Callback):\n"
        "    def on_train_batch_end(self, *_):\n"
        "        raise LookupError('of the second kind')\n"
    )
    chosen = logger("CSVLogger", save_dir="runs", version=0)  # ranks that are forked share no new number
    Path("logger.yaml").write_text(yaml.safe_dump({"trainer": {"logger": chosen}}))
    more = ["--trainer.devices=2", "--trainer.strategy=ddp_fork", "--trainer.callbacks+=breaking.Breaks"]
    command = [sys.executable, "-m", "cli", "fit", "--config", recipe, "--config", "logger.yaml", *more]
    environment = {**os.environ, "PYTHONPATH": f"{_REPOSITORY}{os.pathsep}."}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "memfit: error: rank " in run.stderr.splitlines()[-1]
    assert "LookupError: of the second kind (" in run.stderr.splitlines()[-1]
    assert "breaking.py:4)" in run.stderr.splitlines()[-1]
    assert list(Path().rglob("version_0/config.yaml")), run.stderr[-3000:]


def test_a_saved_configuration_can_be_run_again(recipe):
    assert fit(recipe, logger("CSVLogger", save_dir="runs")) == 0
    assert main(["fit", "--config", "runs/lightning_logs/version_0/config.yaml"]) == 0
    assert folders("runs/lightning_logs") == ["version_0", "version_1"]


def test_a_version_of_the_user_is_not_overwritten(recipe, capsys):
    named = logger("CSVLogger", save_dir="runs", version="best")
    assert fit(recipe, named) == 0
    saved = Path("runs/lightning_logs/best/config.yaml")
    before = saved.read_text()
    assert fit(recipe, named) == 2
    assert "to NOT exist" in capsys.readouterr().err
    assert saved.read_text() == before


def test_runs_at_an_address(recipe, capsys):
    """Lightning's own loggers have a folder for each run there, and others say what is missing."""
    files = fsspec.filesystem("memory")
    at = [logger("CSVLogger", save_dir="memory://logs"), False]
    for _ in range(2):
        assert fit(recipe, at[0]) == 0
    assert fit(recipe, at[1], "--trainer.default_root_dir=memory://plain") == 0
    for version in ("logs/lightning_logs/version_0", "logs/lightning_logs/version_1", "plain"):
        assert files.exists(f"/{version}/config.yaml")
        assert files.find(f"/{version}/checkpoints")
    capsys.readouterr()
    assert fit(recipe, at[1], "--trainer.default_root_dir=memory://plain") == 2
    assert "memory://plain/config.yaml to NOT exist" in capsys.readouterr().err
    assert folders(".") == ["logger.yaml", "recipe.yaml"]
    files.rm("/logs", recursive=True)
    files.rm("/plain", recursive=True)


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
