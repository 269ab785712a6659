"""Every fragment runs, laid over the quickstart recipe."""

import pytest

from cli.main import main
from cli.recipe_files import available

FRAGMENTS = [name for name in available() if name.startswith("fragments/")]


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_fragment_runs(fragment, tmp_path, monkeypatch):
    if fragment == "fragments/wandb":
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--model.config.n_embd=32",
        "--model.config.n_head=2",
        "--data.max_files=30",
        "--data.sequence_length=64",
    ]
    trainer = ["--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    code = main(["fit", "--config", "quickstart", "--trainer.callbacks=[]", "--config", fragment, *arguments, *trainer])
    assert code == 0
