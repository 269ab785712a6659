"""The closed formulae against traced GPT-2 layers; b, s, h, a = 2, 512, 512, 8, figures in units of s·b·h bytes."""

from dataclasses import replace
from functools import cache

import pytest

from lightning_memfit.estimate.architectures import ARCHITECTURES, NamedRun
from lightning_memfit.estimate.named_model import trace_named
from lightning_memfit.memory import Category
from tests.helpers.closed_forms import layer_activation_bytes

BATCH, SEQUENCE, HIDDEN, HEADS = 2, 512, 512, 8
UNIT = BATCH * SEQUENCE * HIDDEN


@cache
def traced_layer(precision, attention, checkpointing, gelu):
    """Bytes a layer keeps for backward: what a model of three keeps more than one of two."""

    def kept(layers):
        sizes = {"n_layer": layers, "n_embd": HIDDEN, "n_head": HEADS, "activation_function": gelu}
        architecture = replace(ARCHITECTURES["gpt2"], config=sizes)
        run = NamedRun("gpt2", BATCH, SEQUENCE, precision=precision, attention=attention, checkpointing=checkpointing)
        events = trace_named(run, architecture, shorten=False).events
        end_of_forward = next(at for at, name in events.phases if name == "backward") - 1
        return events.breakdown_at(end_of_forward).get(Category.ACTIVATION)

    return (kept(3) - kept(2)) / UNIT


def formula(recompute):
    return layer_activation_bytes(BATCH, SEQUENCE, HIDDEN, HEADS, recompute) / UNIT


def test_layer_as_the_paper_has_it():
    # + 0.031: mean and reciprocal deviation of two layer norms, which CUDA keeps in fp32
    assert formula("none") == 74
    assert traced_layer("bf16-true", "eager", "none", "gelu") == pytest.approx(74.031, abs=0.001)


@pytest.mark.nightly
def test_flash_attention_is_the_selective_case():
    # + 0.063: flash attention keeps its log-sum-exp in fp32, 4·a·s·b bytes
    assert formula("selective") == 34
    assert traced_layer("bf16-true", "sdpa", "none", "gelu") == pytest.approx(34.094, abs=0.001)


@pytest.mark.nightly
def test_checkpointed_layer_keeps_its_input():
    assert traced_layer("bf16-true", "sdpa", "full", "gelu") == formula("full") == 2


@pytest.mark.nightly
def test_gelu_of_gpt2_keeps_three_more_tensors():
    # Hugging Face writes GPT-2's tanh approximation out in operators; each result is 4h wide
    more = traced_layer("bf16-true", "sdpa", "none", "gelu_new") - traced_layer("bf16-true", "sdpa", "none", "gelu")
    assert more == pytest.approx(3 * 4 * 2)


@pytest.mark.nightly
def test_autocast_keeps_the_residual_stream_in_fp32():
    # + 4: two residual sums in fp32. Layer norms' outputs are kept as their half-precision copies: as large as before
    assert traced_layer("bf16-mixed", "sdpa", "none", "gelu") == pytest.approx(38.094, abs=0.001)
    assert traced_layer("bf16-mixed", "sdpa", "full", "gelu") == 2 * formula("full")


@pytest.mark.nightly
def test_autocast_keeps_eager_probabilities_in_fp32():
    # softmax runs in fp32: 2·a·s/h more for its output, beside the residual stream
    assert traced_layer("bf16-mixed", "eager", "none", "gelu") == pytest.approx(74 + 4 + 2 * HEADS, abs=0.04)
