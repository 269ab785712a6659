"""Blocks are recognized by their layers; what can't be divided is refused with the sizes that can."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_memfit.strategies.tensor_parallel import plan_blocks

SIZES = {
    "gpt2": {"n_embd": 60, "n_layer": 2, "n_head": 20, "vocab_size": 64},
    "gpt_neox": {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2},
}
LLAMA = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


def build(model_type, **sizes):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.for_model(model_type, **(SIZES.get(model_type, LLAMA) | sizes))
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "sizes", "family", "size", "first"),
    [
        ("gpt2", {}, "GPT-2", 4, "transformer.h.0"),
        ("gpt2", {"n_layer": 1}, "GPT-2", 5, "transformer.h.0"),
        ("llama", {}, "Llama", 3, "model.layers.0"),
        ("mistral", {}, "Llama", 3, "model.layers.0"),
        ("qwen2", {}, "Llama", 3, "model.layers.0"),
        ("gemma", {"head_dim": 8}, "Llama", 3, "model.layers.0"),
    ],
)
def test_blocks_are_recognized(model_type, sizes, family, size, first):
    plans = plan_blocks(build(model_type, **sizes), size)
    assert next(iter(plans)) == first
    assert set(plans.values()) == {family}


@pytest.mark.parametrize(
    ("model_type", "sizes", "size", "message"),
    [
        ("gpt2", {"n_head": 15}, 2, r"divide the 15 heads of transformer.h.0.attn.c_attn. Take a divisor of 15\."),
        ("llama", {}, 2, r"divide the 3 heads of model.layers.0.self_attn.k_proj. Take a divisor of 3\."),
        ("llama", {"intermediate_size": 97}, 3, r"the 97 features of model.layers.0.mlp.gate_proj"),
        ("qwen3", {}, 3, r"no plan for model.layers.0 \(Qwen3DecoderLayer\)"),
        ("mixtral", {}, 3, r"no plan for model.layers.0 \(MixtralDecoderLayer\)"),
        ("gpt_neox", {}, 2, r"no plan for gpt_neox.layers.0"),
    ],
)  # fmt: skip
def test_what_can_not_be_divided_is_refused(model_type, sizes, size, message):
    with pytest.raises(MisconfigurationException, match=f"`tensor_parallel_size={size}`.*{message}"):
        plan_blocks(build(model_type, **sizes), size)


def test_a_module_without_blocks_is_refused():
    with pytest.raises(MisconfigurationException, match="there is no plan for Linear"):
        plan_blocks(nn.Linear(2, 2), 2)


def test_layers_that_are_more_than_linear_are_refused():
    class Quantized(nn.Linear):
        pass

    module = build("llama")
    module.model.layers[1].mlp.up_proj = Quantized(48, 96)
    with pytest.raises(
        MisconfigurationException, match=r"model.layers.1.mlp.up_proj, a Quantized.*adapters or quantized"
    ):
        plan_blocks(module, 3)


def test_the_placement_of_packed_weights_is_where_it_was():
    from torch.distributed.tensor.placement_types import _StridedShard

    placement = _StridedShard(1, split_factor=3)
    assert (placement.dim, placement.split_factor) == (1, 3)
