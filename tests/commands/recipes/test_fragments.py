"""Every fragment composes with the quickstart recipe. Those of techniques run as the contract test runs them."""

import pytest

from cli.main import main
from cli.recipe_files import available
from lightning_memfit.techniques.core.registry import TECHNIQUES

RECORDS = {f"fragments/{technique.name}": technique for technique in TECHNIQUES}
OTHERS = [name for name in available() if name.startswith("fragments/") and name not in (*RECORDS, "fragments/wandb")]
TOGETHER = ["bf16_mixed", "adafactor", "chunked_loss", "attention_kernel", "activation_checkpointing"]
SMALL = [
    "--model.config.n_embd=32",
    "--model.config.n_head=2",
    "--data.max_files=30",
    "--data.sequence_length=64",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=0",
]


def fit(*fragments: str) -> list[str]:
    laid_over = [argument for name in fragments for argument in ("--config", name)]
    return ["fit", "--config", "quickstart", "--trainer.callbacks=[]", *laid_over, *SMALL]


@pytest.mark.nightly_cases("fragments/activation")
@pytest.mark.parametrize("fragment", OTHERS)
def test_fragment_runs(fragment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(fit(fragment)) == 0


def test_wandb_fragment_runs(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    assert main(fit("fragments/wandb")) == 0
    assert list(tmp_path.rglob("*.wandb"))
    wandb.finish()  # Lightning leaves the run open, and the next one of this process would join it


def test_fragments_run_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(fit(*(f"fragments/{name}" for name in TOGETHER))) == 0


@pytest.mark.parametrize("fragment", RECORDS)
def test_fragment_composes(fragment, capsys):
    assert main([*fit(fragment), "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert all(spec.class_path in printed for spec in RECORDS[fragment].callbacks)
    assert all(f"{name}: {value}" in printed for name, value in RECORDS[fragment].trainer.items())
