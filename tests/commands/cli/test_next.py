"""Every report ends with the command to type next, and that command works."""

import shlex
from pathlib import Path

import pytest
import yaml

from cli import plan
from cli.arguments import read_arguments
from cli.main import main

_DEMOS = "lightning.pytorch.demos.boring_classes"
_MODELS, _DATA = "lightning_memfit.models", "lightning_memfit.data"
_TINY = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 256, "vocab_size": 258}


def next_of(output):
    line = output.rstrip().splitlines()[-1]
    assert line.startswith("Next: memfit ")
    return shlex.split(line, comments=True)[2:]


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("model", "data", "command"),
    [
        (f"{_DEMOS}.BoringModel", f"{_DEMOS}.BoringDataModule", "validate"),
        (
            {"class_path": f"{_MODELS}.CausalLM", "init_args": {"config": _TINY}},
            {"class_path": f"{_DATA}.StandardLibraryText", "init_args": {"max_files": 2, "sequence_length": 16}},
            "export",
        ),
    ],
)
def test_a_run_ends_with_what_uses_its_checkpoint(capsys, model, data, command):
    trainer = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "limit_val_batches": 1}
    trainer |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer["callbacks"] = [{"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1}}]
    Path("recipe.yaml").write_text(yaml.safe_dump({"model": model, "data": data, "trainer": trainer}))
    assert main(["fit", "--config", "recipe.yaml"]) == 0
    output = capsys.readouterr().out
    assert "Run: lightning_logs/version_0\n" in output.replace(f"{Path.cwd()}/", "")
    words = next_of(output)
    assert words[0] == command
    assert main(words) == 0


def test_random_weights_are_not_evaluated_without_a_word(capsys):
    trainer = {"accelerator": "cpu", "devices": 1, "limit_val_batches": 1, "enable_progress_bar": False}
    recipe = {"model": f"{_DEMOS}.BoringModel", "data": f"{_DEMOS}.BoringDataModule", "trainer": trainer}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["validate", "--config", "recipe.yaml"]) == 0
    assert "no `--ckpt_path`: the weights are those that the model starts with" in capsys.readouterr().err


def planned(fits, *argv):
    arguments, overrides = read_arguments(plan.make_parser(), argv)
    is_written = fits and arguments.out is not None
    return next_of(plan._next(fits, is_written, arguments, argv, overrides))


def test_a_plan_ends_with_its_training():
    recipe = ["--config", "quickstart", "--trainer.max_steps=3", "--device", "8x A100 80GB"]
    assert planned(True, *recipe, "--out", "a.yaml") == ["fit", *recipe[:3], "--config", "a.yaml"]
    assert planned(True, *recipe) == ["plan", *recipe, "--out", "plan.yaml"]
    Path("plan.yaml").touch()
    assert planned(True, *recipe) == ["plan", *recipe, "--out", "plan_2.yaml"]
    shape = ["--batch-shape", "4x8:int64"]
    assert planned(False, *recipe, *shape) == ["estimate", *recipe, *shape]


@pytest.mark.nightly
def test_an_estimate_ends_with_a_plan(capsys):
    assert main(["estimate", "--model", "gpt2", "--sequence-length", "64", "--device", "12GiB"]) == 0
    assert next_of(capsys.readouterr().out) == ["recipes"]


@pytest.mark.nightly
def test_an_estimate_of_a_recipe_ends_with_a_plan(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = ["--config", "quickstart", "--data.max_files=2"]
    assert main(["estimate", *recipe, "--device", "RTX 3060"]) == 0
    assert next_of(capsys.readouterr().out) == ["plan", *recipe, "--device", "RTX 3060"]
    assert main(["estimate", *recipe, "--device", "RTX 3060", "--json"]) == 0
    assert "Next" not in capsys.readouterr().out
    assert main(["estimate", *recipe, "--trainer.accelerator=cuda"]) == 2
    assert next_of(capsys.readouterr().out) == ["plan", *recipe, "--trainer.accelerator=cuda", "--device", "12GiB"]
