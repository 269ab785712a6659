"""Blocks of GPT-2 are recognized; what can't be divided is refused with a size that can."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_memfit.strategies.tensor_parallel import check_blocks


def build(model_type, **sizes):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))


def gpt2(**sizes):
    return build("gpt2", **{"n_embd": 60, "n_layer": 2, "n_head": 20, "vocab_size": 64, **sizes})


@pytest.mark.parametrize("layers", [1, 2])
def test_blocks_are_recognized(layers):
    assert check_blocks(gpt2(n_layer=layers), 5) == [f"transformer.h.{number}" for number in range(layers)]


def with_another_layer():
    class Adapted(nn.Linear):
        pass

    module = gpt2()
    module.transformer.h[1].mlp.c_fc = Adapted(60, 240)
    return module


@pytest.mark.parametrize(
    ("make", "size", "message"),
    [
        (lambda: gpt2(n_head=15), 2, r"divide the 15 heads of transformer.h.0.attn. Take a divisor"),
        (lambda: build("gpt_neox", hidden_size=64, num_hidden_layers=2), 2, r"gpt_neox.layers.0 \(GPTNeoXLayer\) is"),
        (with_another_layer, 2, r"transformer.h.1 \(GPT2Block\) is none"),
        (lambda: nn.Linear(2, 2), 2, "Linear is none"),
    ],
)
def test_what_can_not_be_divided_is_refused(make, size, message):
    with pytest.raises(MisconfigurationException, match=f"`tensor_parallel_size={size}`.*{message}"):
        check_blocks(make(), size)
