"""What a peer is given is what the row says, and nothing that it would leave out."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.task import Task
from lightning_memfit.bench.experiment import QUIET

SETTINGS: dict[str, Any] = {
    "seed_everything": 3,
    "model": {
        "class_path": "lightning_memfit.models.CausalLM",
        "init_args": {
            "config": {
                "model_type": "gpt2",
                "vocab_size": 50,
                "n_positions": 8,
                "n_embd": 8,
                "n_layer": 1,
                "n_head": 2,
                "bos_token_id": 0,
                "eos_token_id": 0,
                "embd_pdrop": 0.0,
                "resid_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
            "learning_rate": 0.01,
            "weight_decay": 0.0,
            "min_learning_rate_fraction": 1.0,
        },
    },
    "data": {
        "class_path": "lightning_memfit.data.RandomTokens",
        "init_args": {"num_samples": 8, "sequence_length": 8, "batch_size": 2, "vocab_size": 50},
    },
    "trainer": {**QUIET["trainer"], "accelerator": "cpu", "max_steps": 4, "accumulate_grad_batches": 2},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    settings = copy.deepcopy(SETTINGS)
    *parents, name = path.split(".")
    entry = settings
    for parent in parents:
        entry = entry[parent]
    entry[name] = value
    return settings


def test_numbers_weights_and_batches_are_those_of_the_row(tmp_path: Path) -> None:
    task = Task(SETTINGS, tmp_path)
    assert (task.max_steps, task.accumulate, task.seed, task.learning_rate) == (4, 2, 3, 0.01)
    assert task.device == torch.device("cpu")
    first, second = (dict(task.network().named_parameters()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    batches = task.batches()
    epochs = [next(batches)["input_ids"] for _ in range(6)]
    assert torch.equal(epochs[0], epochs[4])
    assert not torch.equal(epochs[0], epochs[1])


def test_precision_decides_weights_and_autocast(tmp_path: Path) -> None:
    half = Task(changed("trainer.precision", "bf16-true"), tmp_path)
    assert {parameter.dtype for parameter in half.network().parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    mixed = Task(changed("trainer.precision", "bf16-mixed"), tmp_path)
    with mixed.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with Task(SETTINGS, tmp_path).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_an_epoch_that_ends_within_an_optimizer_step_is_refused(tmp_path: Path) -> None:
    settings = changed("data.init_args.num_samples", 6)
    with pytest.raises(ValueError, match="3 micro-batches of an epoch .* `trainer.accumulate_grad_batches=2`"):
        assert Task(settings, tmp_path).loader
    settings["trainer"]["max_steps"] = 1
    assert len(Task(settings, tmp_path).loader) == 3


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("trainer.callbacks", [], "`trainer.callbacks` means nothing to a peer"),
        ("optimizer", {}, "`optimizer` means nothing to a peer"),
        ("trainer.devices", 2, "`trainer.devices=2`: peers are run on one device"),
        ("trainer.precision", "64-true", "`trainer.precision=64-true`: peers are run in one of 32-true"),
        ("model.init_args.weight_decay", 0.1, r"`model.init_args.weight_decay=0.1`: peers are compared with 0.0"),
        ("model.init_args.warmup_steps", 5, r"`model.init_args.warmup_steps=5`: peers are compared with 0"),
        ("model.class_path", "tests.helpers.modules.Toy", "peers train the Hugging Face model"),
        ("model.class_path", "nowhere.Toy", "`model.class_path=nowhere.Toy` can't be imported"),
    ],
)
def test_what_would_be_left_out_is_refused(path: str, value: Any, message: str, tmp_path: Path) -> None:
    settings = changed(path, value)
    if path == "model.class_path":
        settings["model"]["init_args"] = {}
    with pytest.raises(ValueError, match=message):
        assert Task(settings, tmp_path).learning_rate
