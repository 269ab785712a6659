"""Code hidden in what a command reads never runs: each carrier through each command that reads it."""

import json
import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import cli.fit  # noqa: F401  before processes are forked
from cli.main import main
from tests.fuzz import RECIPE
from tests.helpers.ranks import run_ranks


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


STRATEGIES = {
    "one device": {},
    "fsdp2": {"class_path": "FullyShardedStrategy", "init_args": {"process_group_backend": "gloo"}},
    "zero_3": {"class_path": "ZeroStrategy", "init_args": {"stage": 3}},
}
CARRIERS = {
    "one device": ["*.ckpt"],
    "fsdp2": ["*.ckpt/meta.pt", "*.ckpt/.metadata", "*.ckpt/*.distcp"],
    "zero_3": ["*.ckpt/*/*model_states.pt", "*.ckpt/*/*optim_states.pt"],
}


def hide_in(file: Path, marker: Path) -> None:
    """Put the payload into a file of a checkpoint, whose digest is then left out, as an attacker would."""
    if file.name == ".metadata":
        index = pickle.loads(file.read_bytes())
        index.planner_data = {**index.planner_data, "hidden": Payload(marker)}
        file.write_bytes(pickle.dumps(index))
    elif file.suffix == ".distcp":
        file.write_bytes(_instead_of_values(file, marker))
    else:
        torch.save(torch.load(file, weights_only=False) | {"hidden": Payload(marker)}, file)
    (file.parent / "memfit_manifest.json").unlink(missing_ok=True)
    (file.parent.parent / "memfit_manifest.json").unlink(missing_ok=True)


def _instead_of_values(file: Path, marker: Path) -> bytes:
    """A shard whose entries that are no tensors are the payload, each as long as before."""
    index = pickle.loads((file.parent / ".metadata").read_bytes())
    data = bytearray(file.read_bytes())
    for place, entry in index.storage_data.items():
        if entry.relative_path == file.name and type(index.state_dict_metadata[place.fqn]).__name__.startswith("Bytes"):
            hidden = pickle.dumps(Payload(marker))
            assert len(hidden) <= entry.length
            data[entry.offset : entry.offset + entry.length] = hidden.ljust(entry.length, b".")
    assert bytes(data) != file.read_bytes()
    return bytes(data)


def resumes(strategy: str, folder: Path) -> list[tuple[str, int]]:
    """Train, hide a payload in each file of the checkpoint in turn, and give it to every command and strategy."""
    marker, found = folder / "ran", []
    chosen = STRATEGIES[strategy]
    options = ["--trainer.strategy", json.dumps(chosen)] if chosen else []
    assert main(["fit", "--config", "recipe.yaml", *options]) == 0
    (saved,) = folder.rglob("checkpoints/*.ckpt")
    for number, pattern in enumerate(CARRIERS[strategy]):
        path = folder / f"carrier-{number}" / saved.name
        path.parent.mkdir()
        os.system(f"cp -r '{saved}' '{path}'")
        file = sorted(path.parent.glob(pattern))[0]
        hide_in(file, marker)
        found += [(f"fit {pattern}", fit("--ckpt_path", str(path), *more)) for more in ([], options)]
        found.append((f"export {pattern}", main(["export", "--ckpt_path", str(path), "--folder", "out"])))
        assert not marker.exists(), (pattern, found)
        if file.suffix in (".pt", ".ckpt"):
            torch.load(file, weights_only=False)
            assert marker.exists()  # it is alive
            marker.unlink()
    return found


@pytest.mark.nightly_cases("fsdp2", "zero_3")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_of_each_strategy(strategy, folder):
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    (ended,) = run_ranks(resumes, 1, folder / "process", strategy, folder, seconds=240)
    assert ended.result, ended.output[-4000:]
    unread = ("export *.ckpt/*.distcp", "generate *.ckpt/*.distcp")  # states of the optimizer
    assert {code for name, code in ended.result if name not in unread} == {2}, ended.result
    assert "Traceback (most recent call last)" not in ended.output, ended.output[-4000:]


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
