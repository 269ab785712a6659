"""Code hidden in what a command reads never runs: each carrier through each command that reads it."""

import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import cli.fit  # noqa: F401  before processes are forked
from cli.main import main
from tests.fuzz import RECIPE


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    write_recipe()
    return tmp_path


def write_recipe(**trainer) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "trainer": {**RECIPE["trainer"], **trainer}}))


def fit(*options: str) -> int:
    return main(["fit", "--config", "recipe.yaml", "--trainer.max_steps", "3", *options])


TAG = "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.PosixPath ['{marker}']]"


def test_plans(folder, capsys):
    marker = folder / "ran"
    Path("plan.yaml").write_text(f"trainer:\n  max_steps: {TAG.format(marker=marker)}\n")
    assert fit("--config", "plan.yaml") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.nightly
def test_cache_entries_are_made_anew(folder):
    marker = folder / "ran"
    estimate = ["estimate", "--config", "recipe.yaml"]
    expected = main(estimate)
    entries = [path for path in (folder / "cache").rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        if path.suffix == ".npz":
            np.savez(path, sizes=np.array([Payload(marker)], dtype=object), allow_pickle=True)
        else:
            path.write_bytes(pickle.dumps(Payload(marker)))
    assert main(estimate) == expected
    assert not marker.exists()


@pytest.mark.parametrize("ending", ["jsonl", "txt", "parquet"])
def test_data_files(folder, ending, capsys, caplog):
    caplog.set_level(logging.CRITICAL + 1, "datasets")  # whose handler may have the output of another test
    marker, file = folder / "ran", folder / f"data.{ending}"
    file.write_bytes(pickle.dumps(Payload(marker)))
    data = {"class_path": "TextData", "init_args": {"dataset": str(file), "tokenizer": "bytes", "sequence_length": 16}}
    data["init_args"]["cache_dir"] = str(folder / "datasets")
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "data": data}))
    assert fit() == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not marker.exists()


def test_tokens_in_the_cache_of_data(folder, capsys):
    marker, file = folder / "ran", folder / "data.jsonl"
    file.write_text("".join(json.dumps({"text": f"text number {n}. " * 20}) + "\n" for n in range(40)))
    data = {"class_path": "TextData", "init_args": {"dataset": str(file), "tokenizer": "bytes", "sequence_length": 16}}
    data["init_args"] |= {"cache_dir": str(folder / "datasets"), "num_workers": 0}
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "data": data}))
    assert fit() == 0
    for path in (folder / "datasets").rglob("tokens-*.npy"):
        np.save(path, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    assert fit() == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not marker.exists()


def test_code_beside_a_model_or_tokenizer(folder, capsys):
    marker, beside = folder / "ran", folder / "model"
    beside.mkdir()
    (beside / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    auto_map = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
    for name in ("config.json", "tokenizer_config.json"):
        (beside / name).write_text(json.dumps({"model_type": "own", "auto_map": auto_map, "tokenizer_class": "Own"}))
    torch.save({"weight": Payload(marker)}, beside / "pytorch_model.bin")
    assert fit("--model.pretrained", str(beside), "--model.config", "null") == 2
    assert fit("--data.tokenizer", str(beside)) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not marker.exists()
