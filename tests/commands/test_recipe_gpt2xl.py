"""The flagship recipe with a tiny local folder instead of GPT-2 XL: load, fit, resume, export, reload."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from cli.main import main
from lightning_memfit.data.tokenization import byte_tokenizer
from lightning_memfit.models.trained import load_checkpoint, network_from_checkpoint
from tests.helpers.continued import continued


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model folder, text, and an override that shrinks the recipe; dropout stays on."""
    root = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=258, bos_token_id=256, eos_token_id=256
    )
    GPT2LMHeadModel(config).save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    with (root / "text.jsonl").open("w") as file:
        for i in range(120):
            file.write(json.dumps({"text": f"{i} bottles of beer on the wall, {i} bottles. " * 6}) + "\n")
    (root / "override.yaml").write_text(yaml.safe_dump(override(root)))
    return root


def override(root):
    checkpoint = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1},
    }
    return {
        "model": {"init_args": {"pretrained": str(root / "model"), "warmup_steps": 2, "learning_rate": 1e-3}},
        "data": {
            "init_args": {
                "dataset": str(root / "text.jsonl"),
                "val_split": None,
                "tokenizer": str(root / "model"),
                "sequence_length": 32,
                "batch_size": 2,
                "global_batch_size": 4,
                "num_workers": 1,
                "tokenize_workers": 1,
                "cache_dir": str(root / "cache"),
            }
        },
        "trainer": {
            "accelerator": "cpu",
            "precision": "32-true",
            "max_steps": 6,
            "accumulate_grad_batches": 2,
            "limit_val_batches": 2,
            "val_check_interval": 4,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "callbacks+": [checkpoint],
        },
    }


def fit(place, run, *options):
    arguments = ["fit", "--config", "gpt2xl", "--config", str(place / "override.yaml")]
    assert main([*arguments, f"--trainer.logger.init_args.save_dir={place / run}", *options]) == 0


def losses(place, run):
    [file] = (place / run).rglob("metrics.csv")
    with file.open() as rows:
        return {
            (int(row["step"]), name): row[name]
            for row in csv.DictReader(rows)
            for name in ("train_loss", "val_loss")
            if row[name]
        }


def checkpoint(place, run, step):
    [file] = (place / run).rglob(f"step={step}.ckpt")
    return str(file)


@pytest.fixture(scope="module")
def trained(place):
    fit(place, "whole")
    return place


@pytest.mark.nightly
def test_starts_from_the_weights_of_the_folder(trained):
    first = float(losses(trained, "whole")[0, "train_loss"])
    reference = GPT2LMHeadModel.from_pretrained(trained / "model")
    weights = load_checkpoint(checkpoint(trained, "whole", 1))["state_dict"]["model.transformer.wte.weight"]
    assert 5 < first < 6
    assert (weights - reference.transformer.wte.weight).abs().max() <= 1.01e-3  # one step of Adam


@pytest.mark.nightly_cases("1")
@pytest.mark.parametrize("step", [1, 3])
def test_resumed_run_has_bitwise_the_losses_of_the_whole_one(trained, step):
    run = f"resumed-{step}"
    fit(trained, run, "--ckpt_path", checkpoint(trained, "whole", step))
    whole, resumed = losses(trained, "whole"), losses(trained, run)
    assert resumed == {key: value for key, value in whole.items() if key[0] >= step}
    final = [load_checkpoint(checkpoint(trained, name, 6))["state_dict"] for name in ("whole", run)]
    assert all(torch.equal(value, final[1][name]) for name, value in final[0].items())


def test_export_reloads_with_equal_logits(trained, tmp_path, capsys):
    path = checkpoint(trained, "whole", 6)
    folder = tmp_path / "exported"
    assert main(["export", "--ckpt_path", path, "--folder", str(folder)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("99 bottles", return_tensors="pt")["input_ids"]
    reloaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    direct = network_from_checkpoint(load_checkpoint(path))
    assert torch.equal(reloaded(inputs).logits, direct(inputs).logits)
    assert main(["export", "--ckpt_path", path, "--folder", str(folder)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_the_example_continues_a_text_with_what_was_exported(trained, tmp_path):
    main(["export", "--ckpt_path", checkpoint(trained, "whole", 6), "--folder", str(tmp_path / "out")])
    example = Path(__file__).parents[2] / "examples" / "generate.py"
    command = [sys.executable, str(example), str(tmp_path / "out"), "99 bot", "--max_new_tokens=8", "--temperature=0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    network = network_from_checkpoint(load_checkpoint(checkpoint(trained, "whole", 6)))
    expected = continued(network, AutoTokenizer.from_pretrained(tmp_path / "out"), "99 bot")
    assert ended.stdout == f"{expected}\n"
    assert expected.startswith("99 bot")


def test_the_recipe_itself_is_the_flagship(capsys):
    assert main(["fit", "--config", "gpt2xl", "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    data, trainer = printed["data"]["init_args"], printed["trainer"]
    assert printed["model"]["init_args"]["pretrained"] == "openai-community/gpt2-xl"
    assert data["sequence_length"] == 1024
    assert data["batch_size"] * trainer["accumulate_grad_batches"] == data["global_batch_size"] == 64
    assert trainer["precision"].startswith("bf16")
    callbacks = {entry["class_path"].rpartition(".")[2]: entry.get("init_args", {}) for entry in trainer["callbacks"]}
    assert callbacks["Optimizer8bit"]["keep_32bit_embeddings"] is True
    assert callbacks["ActivationCheckpointing"]["mode"] == "full"
