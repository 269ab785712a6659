"""`memfit plan` from a recipe to a run, and what it says to impossible demands."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli import made_for
from cli.main import main
from cli.recipe_files import resolve_arguments
from cli.recipe_run import _RecipeCLI, load_recipe

RECIPE = """\
seed_everything: 1
model:
  class_path: lightning_memfit.models.CausalLM
  init_args:
    config: {{model_type: gpt2, n_layer: 3, n_embd: 32, n_head: 2, vocab_size: 300, n_positions: 32}}
data:
  class_path: lightning_memfit.data.StandardLibraryText
  init_args: {{tokenizer: bytes, sequence_length: 32, batch_size: 2, num_workers: 0, max_files: 12}}
trainer:
  accelerator: cpu
  max_steps: 2
  accumulate_grad_batches: 2
  limit_train_batches: 8
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  limit_val_batches: 0
  num_sanity_val_steps: 0
  callbacks:
    - class_path: lightning_memfit.techniques.optimizer_8bit.Optimizer8bit
    - class_path: lightning.pytorch.callbacks.ModelSummary
"""

STOPPING = "lightning.pytorch.callbacks.EarlyStopping"


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format())
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.nightly
def test_from_the_plan_to_the_run(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "plan.yaml")
    code, made = plan(capsys, "--config", recipe, "--device", "900MiB", "--out", out)
    assert code == 0
    assert made["fits"]
    assert made["needed_bytes"] <= made["usable_bytes"]
    assert made["setting"]["micro_batch_size"] * made["setting"]["accumulate_grad_batches"] == 4
    assert made["setting"]["micro_batch_size"] != 2  # of the recipe
    epoch = 16 // made["setting"]["micro_batch_size"]
    assert made["overlay"]["trainer"]["limit_train_batches"] == epoch
    assert any(f"`trainer.limit_train_batches` 8 -> {epoch}" in note for note in made["notes"])
    assert_callbacks_are_the_plan_s(capsys, ["--config", recipe, "--config", out], made)
    rows = {row["name"]: row for row in made["rows"]}
    assert rows["the recipe as it is"]["label"] == "32-true + optimizer_8bit, micro-batch 2 x 2"
    assert rows["the recipe as it is"]["changes"] == []  # its 8-bit states are its own
    assert rows["the best that keeps its numbers"]["fits"]

    assert main(["plan", "--config", recipe, "--device", "900MiB", "--out", out]) == 2
    assert "none is overwritten" in capsys.readouterr().err
    assert main(["fit", "--config", recipe, "--config", out]) == 0
    saved = yaml.safe_load(Path("lightning_logs/version_0/config.yaml").read_text())
    assert saved["made_for"] is None  # a run's own configuration is no plan
    assert saved["trainer"]["limit_train_batches"] == epoch
    assert_an_edited_recipe_is_refused(recipe, out, tmp_path, capsys)


def assert_callbacks_are_the_plan_s(capsys: pytest.CaptureFixture[str], configs: list[str], made: Any) -> None:
    """One by one those of the plan, and those of the recipe that are no techniques."""
    with ExitStack() as context:
        cli = _RecipeCLI(resolve_arguments(configs), weights=False, context=context)
    classes = [spec.class_path for spec in cli.as_written.trainer.callbacks]
    assert classes.count("lightning.pytorch.callbacks.ModelSummary") == 1
    named = classes.count("lightning_memfit.techniques.optimizer_8bit.Optimizer8bit")
    assert named == ("optimizer_8bit" in made["setting"]["techniques"])
    capsys.readouterr()


def test_an_option_beside_a_plan_counts_its_batches(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    with load_recipe(["--config", recipe], None, False) as run:
        stamp = made_for.made_for(run.config, "CPU")
    out.write_text(yaml.safe_dump({"made_for": stamp, "trainer": {"limit_train_batches": 16}}))
    both = ["fit", "--config", recipe, "--config", str(out), "--print_config"]
    for options, expected in (([], 16), (["--trainer.limit_train_batches=3"], 3)):
        assert main([*both, *options]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["trainer"]["limit_train_batches"] == expected
    out.write_text(yaml.safe_dump({"made_for": stamp}))  # a plan that leaves the number as it is
    assert main([*both, "--trainer.limit_train_batches=3"]) == 0


def assert_an_edited_recipe_is_refused(recipe: str, out: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An old plan would halve the batch of an edited recipe and drop what it was given since, without a word."""
    edited = folder / "edited.yaml"
    values = yaml.safe_load(Path(recipe).read_text())
    values["data"]["init_args"]["batch_size"] = 4
    values["trainer"]["gradient_clip_val"] = 0.5
    values["trainer"]["limit_train_batches"] = 12
    edited.write_text(yaml.safe_dump(values))
    capsys.readouterr()
    assert main(["fit", "--config", str(edited), "--config", out]) == 2
    message = capsys.readouterr().err
    assert "`trainer.limit_train_batches` was 8 and is 12" in message
    assert "`data.batch_size` was 2 and is 4" in message
    assert "`trainer.gradient_clip_val` was not set and is 0.5" in message
    assert "made_for: {}" in message
    # What a plan says nothing about may change: how long a run is, what watches it, how many workers load.
    values = yaml.safe_load(Path(recipe).read_text())
    values["trainer"]["max_steps"] = 3
    values["trainer"]["callbacks"].append({"class_path": STOPPING, "init_args": {"monitor": "val_loss"}})
    edited.write_text(yaml.safe_dump(values))
    options = [
        "--trainer.log_every_n_steps=1",
        "--data.init_args.num_workers=1",
        f"--trainer.default_root_dir={folder}/run",
    ]
    cli = _RecipeCLI(["--config", str(edited), "--config", out, *options], weights=True, context=ExitStack())
    assert STOPPING in [spec.class_path for spec in cli.as_written.trainer.callbacks]
    with pytest.raises(ValueError, match="are two plans"):
        again = shutil.copy(out, folder / "again.yaml")
        _RecipeCLI(["--config", recipe, "--config", out, "--config", str(again)], weights=True, context=ExitStack())
    Path(again).write_text(re.sub(r"made_for:.*?\n(?=\w)", "made_for: {}\n", Path(out).read_text(), flags=re.S))
    values["data"]["init_args"]["batch_size"] = 1
    edited.write_text(yaml.safe_dump(values))
    _RecipeCLI(["--config", str(edited), "--config", str(again)], weights=True, context=ExitStack())


@pytest.mark.nightly
def test_a_plan_that_offloads_trains_with_deepspeed(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed")
    capsys.readouterr()  # which greets on stdout
    out = str(tmp_path / "plan.yaml")
    larger = ["--config", recipe, "--model.config.n_embd=512", "--model.config.n_layer=12"]
    code, made = plan(capsys, *larger, "--device", "950MiB", "--host-memory", "8GiB", "--allow", "exact", "--out", out)
    assert code == 0, made["summary"]
    strategy = yaml.safe_load(Path(out).read_text())["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_memfit.strategies.ZeroStrategy"
    assert strategy["init_args"]["offload_optimizer"]
    assert sum(made["breakdown"]["pinned_host"].values()) > 8 * made["num_parameters"]
    finished = subprocess.run(
        [sys.executable, "-m", "lightning_memfit.cli", "fit", *larger, "--config", out],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


@pytest.mark.nightly
def test_nothing_fits_a_device_of_one_mebibyte(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, made = plan(capsys, "--config", recipe, "--device", "1MiB")
    assert code == 1
    assert made["summary"].startswith("Nothing fits")
    assert made["overlay"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "3x 900MiB", "--trainer.devices=1"], "4 samples per optimizer step"),
        (["--device", "0x 900MiB"], "at least one device"),
        (["--device", "cpu", "--trainer.devices=2"], "are not planned for"),
        (["--device", "900MiB", "--nvme-path", "nowhere"], "no such folder"),
        (["--device", "900MiB", "--allow", "exact,fp7"], "fp7 is none of"),
        (["--device", "900MiB", "--allow", ""], "allow"),
        (["--device", "900MiB", "--prefer", "size"], "`--prefer=size` is none of numbers, speed"),
        (["--device", "900MiB", "--host-memory", "0GB"], "--host-memory"),
        (["--device", "no such card"], "unknown"),
    ],
)
def test_impossible_demands_end_with_one_message(
    recipe: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config", recipe, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
