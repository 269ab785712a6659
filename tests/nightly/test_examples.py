"""Every example runs with its quick recipe, and an estimate of those with an `example_batch` reads no data."""

import re
from pathlib import Path

import pytest
import yaml

from tests.helpers.strategy_launch import run_program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
SIZES = ("mel_bins", "target_length", "image_size", "seconds")
NO_ADAPTERS = {"preference": ["--model.lora_rank=null"]}
"""Adapters of peft that `configure_model` makes can't be traced."""
EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "generate")  # which trains nothing
RUN = """
import sys
from cli.main import main
print("RESULT", main(sys.argv[1:]), flush=True)
"""


def run_here(folder, *arguments):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return run_program(RUN, *arguments, cwd=folder, env=environment | {"HOME": str(folder)}, timeout=240)


def skip_without_libraries(name):
    """What an example imports at its top, the package and what that requires left out."""
    for library in re.findall(r"^(?:from|import) (\w+)", (FOLDER / f"{name}.py").read_text(), re.MULTILINE):
        pytest.importorskip(library, reason=f"examples/{name}.py needs {library}", exc_type=ImportError)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_runs_with_its_quick_recipe(tmp_path, name):
    skip_without_libraries(name)
    configs = [f"--config={FOLDER / file}" for file in (f"{name}.yaml", f"{name}_quick.yaml")]
    run = run_here(tmp_path, "fit", *configs)
    assert "RESULT 0" in run.stdout, run.stderr[-4000:]
    assert list((tmp_path / "runs" / name).rglob("metrics.csv"))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "example_batch" in (FOLDER / f"{name}.py").read_text()])
def test_an_estimate_reads_no_data(tmp_path, name):
    skip_without_libraries(name)
    quick = yaml.safe_load((FOLDER / f"{name}_quick.yaml").read_text())
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"model": quick["model"]}))
    asked = [f"--data.{key}={value}" for key, value in quick["data"]["init_args"].items() if key in SIZES]
    asked += NO_ADAPTERS.get(name, [])
    configs = [f"--config={file}" for file in (FOLDER / f"{name}.yaml", tmp_path / "tiny.yaml")]
    run = run_here(tmp_path, "estimate", *configs, *asked, "--data.batch_size=2", "--device=12GiB", "--no-cache")
    assert "RESULT 0" in run.stdout, run.stderr[-4000:]


def test_each_has_a_recipe_of_its_name():
    files = {f"{name}{ending}" for name in EXAMPLES for ending in (".py", ".yaml", "_quick.yaml")} | {"generate.py"}
    assert {file.name for file in FOLDER.iterdir() if file.is_file()} == files
    for name in EXAMPLES:
        recipe = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        assert recipe["trainer"]["logger"]["init_args"]["name"] == name
        assert recipe["model"]["class_path"].startswith(f"examples.{name}.")
