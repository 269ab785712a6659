"""Estimates and plans without data, weights or network."""

import json
import time
from pathlib import Path

import pytest
import torch
import yaml

import lightning_memfit.hub
from cli.main import main
from cli.recipe_run import load_recipe, parse_batch_shape
from lightning_memfit.data import PairData, TextData
from lightning_memfit.estimate.architectures import ARCHITECTURES
from lightning_memfit.estimate.named import architecture_of

_OWN = """
import lightning.pytorch as pl, torch
from transformers import AutoModelForSequenceClassification, GPT2LMHeadModel
class Tagger(pl.LightningModule):
    def __init__(self, name: str, auto: bool = True):
        super().__init__()
        if auto:
            self.network = AutoModelForSequenceClassification.from_pretrained(name, num_labels=7)
        else:
            self.network = GPT2LMHeadModel.from_pretrained(name)
    def training_step(self, batch, batch_idx):
        return self.network(**batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""


@pytest.fixture
def away(tmp_path, monkeypatch):
    """A folder with nothing in it, and a hub that can't be reached: its port answers to nobody."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    lightning_memfit.hub.is_reachable.cache_clear()
    yield tmp_path
    lightning_memfit.hub.is_reachable.cache_clear()


@pytest.mark.nightly
def test_the_readme_s_recipe_needs_neither_data_nor_tokenizer_nor_hub(away, capsys):
    begun = time.perf_counter()
    assert main(["estimate", "--config", "gpt2xl", "--device", "A100 80GB", "--json"]) == 0
    assert time.perf_counter() - begun < 40  # retries alone would take longer
    report = json.loads(capsys.readouterr().out)
    assert report["num_parameters"] == 1_557_611_200
    assert (report["micro_batch_size"], report["sequence_length"]) == (4, 1024)
    assert {path.name for path in away.iterdir()} == {"cache"}


def test_pretrained_weights_in_an_own_module_are_not_loaded(away, capsys):
    Path("own_tagger.py").write_text(_OWN)
    Path("own.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"class_path": "own_tagger.Tagger", "init_args": {"name": "openai-community/gpt2-xl"}},
                "trainer": {"max_steps": 1, "accelerator": "cpu"},
            }
        )
    )
    shapes = "input_ids=2x8:int64,attention_mask=2x8:int64,labels=2:int64"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(away))
        with load_recipe(["--config", "own.yaml"], shapes) as run:
            assert all(parameter.is_meta for parameter in run.module.parameters())
            assert run.module.network.score.out_features == 7
        with load_recipe(["--config", "own.yaml", "--model.auto=false"], shapes) as run:
            assert all(parameter.is_meta for parameter in run.module.parameters())
    small = ["--model.name=distilbert/distilbert-base-uncased", f"--batch-shape={shapes}", "--device=12GiB"]
    assert main(["estimate", "--config", "own.yaml", *small, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_parameters"] == ARCHITECTURES["distilbert-base"].num_parameters + 5 * 769  # 7 classes, not 2
    assert report["micro_batch_size"] == 2


_READS = """
import lightning.pytorch as pl, numpy, torch
from transformers import GPT2LMHeadModel
class Reader(pl.LightningModule):
    def __init__(self, name: str, late: bool = False, mistake: bool = False):
        super().__init__()
        self.name = name
        if not late:
            self.configure_model()
        if mistake:
            self.width = self.network.config.no_such_width
    def configure_model(self):
        self.network = GPT2LMHeadModel.from_pretrained(self.name)
        self.scale = READ
    def training_step(self, batch, batch_idx):
        return self.network(**batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""
_SHAPES = "--batch-shape=input_ids=2x8:int64,labels=2x8:int64"


@pytest.fixture
def reader(away, monkeypatch, request):
    """A recipe whose module reads weights' values where it is made, and a folder with such weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=50, n_positions=16)).save_pretrained("weights")
    name = f"own_reader_{abs(hash(request.param))}"
    Path(f"{name}.py").write_text(_READS.replace("READ", request.param))
    model = {"class_path": f"{name}.Reader", "init_args": {"name": "weights"}}
    Path("own.yaml").write_text(yaml.safe_dump({"model": model, "trainer": {"max_steps": 1, "accelerator": "cpu"}}))
    monkeypatch.syspath_prepend(str(away))
    return ["--config", "own.yaml", _SHAPES, "--device=12GiB"]


@pytest.mark.nightly_cases("numpy", "sum(")
@pytest.mark.parametrize(
    "reader",
    [
        "2.0 if self.network.lm_head.weight.std() > 1 else 1.0",
        "numpy.asarray(self.network.lm_head.weight.detach()).mean()",
        "sum(self.network.transformer.ln_f.weight.tolist())",
    ],
    indirect=True,
)
def test_weights_whose_values_a_module_reads_are_not_there(reader, capsys):
    assert main(["estimate", *reader]) == 2
    told = capsys.readouterr().err
    assert told.startswith("memfit: error: own_reader")
    assert "reads values of pretrained weights" in told
    assert "Move that line to `configure_model`" in told
    assert main(["estimate", *reader, "--model.late=true", "--json"]) == 0  # what the message advises


def test_another_owner_s_model_is_named_where_it_cannot_be_had(away, capsys):
    assert main(["estimate", "--model", "someone/gpt2-xl"]) == 2
    told = capsys.readouterr().err
    assert "`--model someone/gpt2-xl`" in told
    assert "Closest: gpt2-xl" in told
    assert "the hub can't be reached" in told


def test_example_batches_have_the_shapes_of_real_ones(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("a b c " * 500)
    pairs = tmp_path / "a.jsonl"
    pairs.write_text("".join(json.dumps({"source": f"{n} a", "target": "b"}) + "\n" for n in range(40)))
    for data in (
        TextData(str(text), "bytes", sequence_length=16, batch_size=2, num_workers=0, cache_dir=str(tmp_path)),
        PairData(str(pairs), "bytes", source_length=8, target_length=6, batch_size=2, num_workers=0),
    ):
        example = data.example_batch(258)
        data.prepare_data()
        data.setup("fit")
        real = next(iter(data.train_dataloader()))
        assert {name: (one.shape, one.dtype) for name, one in example.items()} == {
            name: (one.shape, one.dtype) for name, one in real.items()
        }
        assert example["input_ids"].max() < 258


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("ids=4x8:int64,labels=4:int64", {"ids": ((4, 8), torch.int64), "labels": ((4,), torch.int64)}),
        ("4x3x8x8,4:int64", [((4, 3, 8, 8), torch.float32), ((4,), torch.int64)]),
        ("4x8:bfloat16", ((4, 8), torch.bfloat16)),
    ],
)
def test_batch_shapes(text, shapes):
    def described(value):
        if isinstance(value, dict):
            return {name: described(one) for name, one in value.items()}
        return [described(one) for one in value] if isinstance(value, list) else (tuple(value.shape), value.dtype)

    assert described(parse_batch_shape(text)) == shapes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("4x", "'4x' is no shape"),
        ("a=4,4", "a name of its own"),
        ("4:int65", "'int65' is no type"),
        ("0x4", "must have from 1"),
        ("99999999x99999999", "must have from 1"),
    ],
)
def test_impossible_batch_shapes_are_refused(text, told):
    with pytest.raises(ValueError, match=told):
        parse_batch_shape(text)


def test_the_cache_of_the_hub_is_read(away, monkeypatch):
    import huggingface_hub

    snapshot = away / "hub" / "models--own--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(away / "hub"))
    assert architecture_of("own/tiny").model_type == "gpt2"
