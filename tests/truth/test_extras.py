"""What happens without optional packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_memfit.extras
from cli.errors import missing_extra
from cli.main import main
from lightning_memfit.extras import EXTRAS, how_to_install, is_installed, require

_REPOSITORY = Path(__file__).parents[2]


_FOUR_BITS = {"class_path": "ReplaceOptimizer", "init_args": {"name": "torchao.AdamW4bit"}}


@pytest.fixture
def without(monkeypatch):
    """Let packages be missing, as the import system sees it."""

    def leave_out(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return leave_out


def test_every_extra_is_one_of_the_project():
    if sys.version_info < (3, 11):
        import tomli as tomllib
    else:
        import tomllib
    known = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(known)
    assert all(f"{extra}" in known["all"][0] for extra in set(EXTRAS.values()))


def test_what_is_missing_is_said_with_what_to_type(without):
    without("wandb")
    assert is_installed("torch")
    assert not is_installed("wandb")
    with pytest.raises(ModuleNotFoundError, match=r'^X needs wandb: pip install "lightning-memfit\[wandb\]"$'):
        require("wandb", "X")
    assert how_to_install("liger_kernel") == "pip install liger_kernel"


@pytest.mark.parametrize(
    ("package", "changes"),
    [
        ("wandb", {"trainer": {"logger": {"class_path": "lightning.pytorch.loggers.WandbLogger"}}}),
        ("deepspeed", {"trainer": {"strategy": "memfit_zero_2"}}),
        ("deepspeed", {"trainer": {"strategy": "deepspeed_stage_2"}}),
        ("torchao", {"trainer": {"callbacks": [_FOUR_BITS]}}),
        ("datasets", {"data": {"class_path": "TextData", "init_args": {"dataset": "own/texts", "tokenizer": "bytes"}}}),
    ],
)  # fmt: skip
def test_a_run_that_misses_a_package_ends_in_one_line(without, tmp_path, monkeypatch, capsys, package, changes):
    monkeypatch.chdir(tmp_path)
    without(package)
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 258}
    recipe = {"model": {"class_path": "CausalLM", "init_args": {"config": config}}, "data": "StandardLibraryText"}
    trainer = {"max_steps": 1, "accelerator": "cpu", **changes.get("trainer", {})}
    Path("a.yaml").write_text(yaml.safe_dump({**recipe, **changes, "trainer": trainer}))
    capsys.readouterr()
    assert main(["fit", "--config", "a.yaml"]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memfit: error: ")]
    assert len(told) == 1
    assert told[0].endswith(f'pip install "lightning-memfit[{EXTRAS[package]}]"')
    assert package in told[0]


@pytest.mark.nightly
def test_callbacks_on_an_own_module_import_nothing_that_they_do_not_use():
    program = """
import sys
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
before = set(sys.modules)
import torch
from lightning_memfit import MemoryLimit, MemoryMonitor, MicroBatching, ZeroGradAfterStep
callbacks = [MemoryLimit("1GiB"), MicroBatching(), ZeroGradAfterStep(), MemoryMonitor()]
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
L.Trainer(max_steps=1, limit_val_batches=0, callbacks=callbacks, **options).fit(BoringModel(), BoringDataModule())
optional = ("transformers", "bitsandbytes", "datasets", "pyarrow", "torchao", "peft", "deepspeed", "wandb", "pydantic")
print(sorted(name for name in optional if name in sys.modules and name not in before), file=sys.stderr)
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.splitlines()[-1] == "[]"


def test_output_that_nobody_reads_to_its_end_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cli", "recipes"]
    finished = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=_REPOSITORY, timeout=60)
    os.close(write)
    assert (finished.returncode, finished.stderr) == (0, b"")


def test_a_recipe_is_copied_into_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "quickstart", "."]) == 0
    assert (tmp_path / "quickstart.yaml").is_file()


@pytest.mark.parametrize("command", [["bench", "--experiment", "nothing"], ["scale", "--config", "nothing"]])
def test_experiments_come_with_the_package_by_name(command, capsys):
    assert main(command) == 2
    assert ("bert_large" if command[0] == "bench" else "scaling") in capsys.readouterr().err


def test_nothing_else_looks_for_packages():
    """One place is asked, so that what is missing is said in one way."""
    allowed = {"extras.py", "one_lightning.py", "culprit.py", "ranks.py"}
    found = [path for path in _REPOSITORY.glob("lightning_memfit/**/*.py") if "find_spec" in path.read_text()]
    assert {path.name for path in found} <= allowed
    assert lightning_memfit.extras.EXTRAS["datasets"] == "text"


def test_errors_that_are_each_others_context_are_looked_at_once():
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert missing_extra(one) is None
