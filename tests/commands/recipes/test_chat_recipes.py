"""The recipes that people come for: they run with their quick override, are estimated from their files alone, and are
listed with figures that are still what an estimate says."""

import json
import os
import socket
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from benchmarks.recipe_sizes import BENCHMARKS, DEVICES, PLANS, RECIPES, case_of, models, size
from benchmarks.runner import read as read_result
from cli.main import main
from cli.recipe_files import SIZES, TASKS, available, resolve
from lightning_memfit.estimate.architectures import known_configuration
from tests.helpers.strategy_launch import run_program

ROOT = Path(__file__).parents[3]
RUN_ALL = """
import sys
from cli.main import main
for name in sys.argv[1:]:
    quick = f"quick/{name.partition('_')[0]}"
    print("RESULT", name, main(["fit", "--config", name, "--config", quick]), flush=True)
"""
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 512}
KINDS = {"llama3": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text", "mistral": "mistral"}


def read(name):
    return yaml.safe_load(Path(resolve(name)).read_text())


@pytest.mark.nightly
def test_each_runs_with_its_quick_override(tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = run_program(RUN_ALL, *TASKS, cwd=tmp_path, env=environment, timeout=420)
    assert len(TASKS) == 4
    for name in TASKS:
        assert f"RESULT {name} 0" in run.stdout, run.stderr[-4000:]
        assert list((tmp_path / "runs" / name).rglob("*.ckpt"))


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """No connection can be opened, and nothing is in the cache of the hub."""

    def refuse(*_, **__):
        raise OSError("there is no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "model"), list(zip(TASKS, KINDS, strict=True)))
def test_an_estimate_needs_neither_data_nor_weights_nor_network(no_network, capsys, recipe, model):
    """Of the recipe as it is with a model laid over it; only the architecture is a small one of the same class."""
    changes = {**TINY, **({"layer_types": ["sliding_attention"] * 5 + ["full_attention"]} if model == "gemma3" else {})}
    small = [f"--model.config={json.dumps(changes)}", "--data.sequence_length=64", "--data.batch_size=2"]
    arguments = ["--config", recipe, "--config", f"models/{model}", *small, "--device", "12GiB", "--json", "--no-cache"]
    assert main(["estimate", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["micro_batch_size"], found["sequence_length"]) == (2, 64)
    assert found["largest_micro_batch_size"] > 2
    assert not os.listdir()


@pytest.mark.parametrize("name", models())
def test_every_model_is_one_that_estimates_know_offline(name):
    overlay = read(name)
    pretrained = overlay["model"]["init_args"]["pretrained"]
    assert overlay["data"]["init_args"]["tokenizer"] == pretrained
    assert known_configuration(pretrained)["model_type"] == KINDS[name.removeprefix("models/")]


@pytest.mark.parametrize("name", TASKS)
def test_every_recipe_says_what_it_is_for(name):
    recipe, task = read(name), TASKS[name]
    data = recipe["data"]["init_args"]
    assert recipe["trainer"]["logger"]["init_args"]["name"] == name
    assert data["tokenizer"] == recipe["model"]["init_args"]["pretrained"]
    assert task.sample == f"{data['sequence_length']:,} tokens"
    first = available()[name].read_text().splitlines()[0].lower()
    assert task.words.partition(",")[0].split()[0] in first


# --- sizes ------------------------------------------------------------------------------------------------------------

ROWS = json.loads(SIZES.read_text())["rows"]


def test_every_recipe_is_on_a_page_with_a_plan_for_each_card():
    assert sorted(RECIPES) == sorted(TASKS)
    plans = [row["name"] for row in read_result(PLANS)["rows"]]
    assert sorted(plans) == sorted(case.name for case in BENCHMARKS["recipe_plans"].cases(Namespace()))


@pytest.mark.nightly
def test_a_recorded_size_is_what_an_estimate_says(tmp_path, monkeypatch):
    """The first row's; `python -m benchmarks recipe_sizes` writes them all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    row = ROWS[0]
    now = size(case_of(row["recipe"], row["model"]), Namespace(), {})
    assert now["num_parameters"] == row["num_parameters"]
    for device in DEVICES:
        assert now["largest_micro_batch"][device] == pytest.approx(row["largest_micro_batch"][device], rel=0.1, abs=1)
