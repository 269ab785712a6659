from dataclasses import replace

import pytest
import torch

from lightning_memfit.estimate.adapters import linear_weights, quantized_bytes, with_lora, with_quantized_weights
from lightning_memfit.estimate.variants import steady_step
from lightning_memfit.memory import Category
from lightning_memfit.profile.record import ParameterInfo
from tests.unit.estimate.steps import GRADIENT, WEIGHT, step_profile

WEIGHTS = ParameterInfo("h.0.mlp.weight", 1 << 20, 4, dims=2, shape=(512, 2048))


@pytest.fixture
def variant():
    return steady_step(step_profile())


def test_lora_trains_two_thin_matrices(variant):
    side = WEIGHT // 4096
    adapter = 4 * 8 * (1024 + side)
    forward = with_lora(variant, 8).phases["forward"]
    assert forward.get(Category.PARAMETER) == WEIGHT + adapter
    assert forward.get(Category.GRADIENT) == adapter < GRADIENT
    assert forward.get(Category.OPTIMIZER_STATE) == 2 * adapter
    assert forward.get(Category.ACTIVATION) == variant.phases["forward"].get(Category.ACTIVATION)


def test_lora_figures_agree_with_peft():
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 32, bias=False))
    config = peft.LoraConfig(r=4, target_modules=["0", "1"])
    adapted = peft.get_peft_model(model, config)
    real = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    shapes = [
        ParameterInfo("0.weight", 8192, 4, dims=2, shape=(128, 64)),
        ParameterInfo("1.weight", 4096, 4, dims=2, shape=(32, 128)),
    ]
    changed = with_lora(replace(steady_step(step_profile()), parameters=tuple(shapes)), 4)
    assert sum(p.numel for p in changed.parameters if p.trainable) == real


def test_quantized_weights_need_their_bits_and_scales(variant):
    frozen = with_lora(variant, 8)
    before = frozen.phases["forward"].get(Category.PARAMETER)
    after = with_quantized_weights(frozen, 4).phases["forward"]
    n = WEIGHT // 4
    assert before - after.get(Category.PARAMETER) == 4 * n - (n // 2 + n // 64 + 4 * (n // 64 // 256))
    assert after.get(Category.TEMPORARY) == 2 * n


@pytest.mark.parametrize("double_quantization", [False, True])
def test_four_bit_bytes_are_those_of_bitsandbytes(double_quantization):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(512, 2048)
    data, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=double_quantization
    )
    scales = [state.absmax] + ([state.state2.absmax] if double_quantization else [])
    real = sum(tensor.numel() * tensor.element_size() for tensor in (data, *scales))
    assert quantized_bytes(WEIGHTS, 4, double_quantization) == real


def test_eight_bit_bytes():
    assert quantized_bytes(WEIGHTS, 8) == (1 << 20) + 4 * 512


def test_embeddings_are_no_linear_layers():
    table = [replace(WEIGHTS, name=name) for name in ("wte.weight", "h.0.mlp.weight", "embed_tokens.weight")]
    assert [p.name for p in linear_weights(table)] == ["h.0.mlp.weight"]
    assert [p.name for p in linear_weights(table, ["wte"])] == ["wte.weight"]


def test_mistakes_are_named(variant):
    with pytest.raises(ValueError, match="rank=0"):
        with_lora(variant, 0)
    with pytest.raises(ValueError, match="targets="):
        with_lora(variant, 8, targets=["q_proj"])
    with pytest.raises(ValueError, match="bits=3"):
        with_quantized_weights(variant, 3)
    with pytest.raises(ValueError, match="are trained"):
        with_quantized_weights(variant, 4)
