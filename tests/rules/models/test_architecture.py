import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memfit.models.architecture import build, max_positions, resolve_config

TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 64}


@pytest.fixture
def folder(tmp_path):
    GPT2LMHeadModel(GPT2Config(**{k: v for k, v in TINY.items() if k != "model_type"})).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_inline_architecture():
    config = resolve_config(None, None, TINY)
    assert (config.n_layer, config.hidden_size) == (2, 16)
    assert max_positions(config) == 32


def test_pretrained_weights_are_loaded(folder):
    network = build(resolve_config(folder, None, {"attn_pdrop": 0.0}), folder, "sdpa")
    reference = GPT2LMHeadModel.from_pretrained(folder)
    assert torch.equal(network.transformer.wte.weight, reference.transformer.wte.weight)
    assert network.config.attn_pdrop == 0.0


@pytest.mark.parametrize("pretrained", [True, False])
def test_built_in_the_default_dtype(folder, pretrained):
    torch.set_default_dtype(torch.bfloat16)
    try:
        network = build(resolve_config(None, folder, None), folder if pretrained else None, "sdpa")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, None), "are all empty"),
        ((None, None, {"n_layer": 2}), "lacks `model_type`"),
        ((None, None, {"model_type": "gpt22"}), "`config.model_type='gpt22'` is unknown"),
        ((None, None, {**TINY, "n_layers": 2}), r"`config.n_layers` is no entry of a 'gpt2'.*Closest: n_layer"),
        (("a", "b", None), "name two models"),
        (("./nowhere", None, None), r"`pretrained='./nowhere'` is a path, but there is no such folder"),
        ((None, "/nowhere", None), r"`config_name='/nowhere'` is a path"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_config(*arguments)
