"""The recipes for several GPUs run here with their quick override, and are what their first lines say."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cli.recipe_files import available, resolve

pytest.importorskip("deepspeed")
ROOT = Path(__file__).parents[2]
RECIPES = ("gpt2xl_ddp", "gpt2xl_fsdp2", "gpt2xl_zero2", "gpt2xl_zero3_offload", "multi_node")
RUN_ALL = """
import sys
from cli.main import main
for name in sys.argv[1:]:
    one_rank = ["--trainer.strategy.init_args.sharding_size=1"] if name == "multi_node" else []
    print("RESULT", name, main(["fit", "--config", name, "--config", "quick/gpt2xl", *one_rank]), flush=True)
"""


def read(name):
    return yaml.safe_load(Path(resolve(name)).read_text())


@pytest.mark.slow
def test_each_runs_with_its_quick_override(tmp_path):
    command = [sys.executable, "-c", RUN_ALL, *RECIPES]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    for name in RECIPES:
        assert f"RESULT {name} 0" in run.stdout, run.stderr[-4000:]
        assert list((tmp_path / "runs" / name).rglob("*.ckpt"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_it_is_for(name):
    first = available()[name].read_text().splitlines()[0]
    assert first.startswith("# GPT-2 XL")
    assert read(name)["trainer"]["logger"]["init_args"]["name"] == name


def test_the_offload_recipe_is_the_published_configuration():
    recipe = read("gpt2xl_zero3_offload")
    assert recipe["data"]["init_args"]["batch_size"] == 16
    assert recipe["data"]["init_args"]["sequence_length"] == 128
    assert recipe["model"]["init_args"]["learning_rate"] == 5e-4
    assert recipe["trainer"]["strategy"]["init_args"]["stage"] == 3
    assert recipe["trainer"]["strategy"]["init_args"]["offload_optimizer"] is True
    assert (recipe["trainer"]["devices"], recipe["trainer"]["precision"]) == (1, "16-mixed")


def test_two_machines_shard_within_each():
    recipe = read("multi_node")["trainer"]
    assert recipe["num_nodes"] == 2
    assert recipe["strategy"]["init_args"]["sharding_size"] == recipe["devices"]
