"""Every fragment and technique composes with the quickstart recipe. Techniques alone run in the contract test."""

import pytest
import yaml

from cli.main import main
from cli.recipe_files import available
from lightning_memfit.techniques.core.registry import TECHNIQUES

RECORDS = {technique.name: technique for technique in TECHNIQUES}
FRAGMENTS = [name for name in available() if name.startswith("fragments/") and name != "fragments/wandb"]
SMALL = [
    "--model.config.n_embd=32",
    "--model.config.n_head=2",
    "--data.max_files=30",
    "--data.sequence_length=64",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=0",
]


def fit(*laid_over: str) -> list[str]:
    return ["fit", "--config", "quickstart", "--trainer.callbacks=[]", *laid_over, *SMALL]


@pytest.mark.nightly_cases("fragments/activation")
@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_fragment_runs(fragment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(fit("--config", fragment)) == 0


def test_wandb_fragment_runs(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    assert main(fit("--config", "fragments/wandb")) == 0
    assert list(tmp_path.rglob("*.wandb"))
    wandb.finish()  # Lightning leaves the run open, and the next one of this process would join it


@pytest.mark.parametrize("name", RECORDS)
def test_technique_composes(name, capsys):
    assert main([*fit(f"--with={name}"), "--print_config"]) == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    for option, value in RECORDS[name].config()["trainer"].items():
        if option.endswith("+"):
            written = [spec["class_path"] for spec in trainer[option.removesuffix("+")]]
            assert written == [spec["class_path"] for spec in value]
        else:
            assert trainer[option] == value


@pytest.mark.parametrize("command", ["fit", "estimate", "plan"])
def test_a_name_of_no_technique_is_refused_with_the_closest(command, capsys):
    assert main([command, "--config", "quickstart", "--with", "optimizer_8bits"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("memfit: error: `--with optimizer_8bits` is no technique. Closest: optimizer_8bit, ")
    assert len(told.splitlines()) == 1
