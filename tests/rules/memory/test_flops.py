"""FLOPs of attention with fewer heads of keys and values than of queries, counted by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_memfit.memory.flops import FORMULAS, flop_formula

aten = torch.ops.aten

BATCH, HEADS, GROUPS, LENGTH, WIDTH = 2, 8, 2, 16, 32
PRODUCT = 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH  # the kernel multiplies each of the query's heads


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def operands(groups: int = GROUPS) -> list[torch.Tensor]:
    shapes = [(BATCH, heads, LENGTH, WIDTH) for heads in (HEADS, groups, groups)]
    return [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]


FORWARD: list[tuple[Any, tuple[Any, ...]]] = [
    (aten._scaled_dot_product_flash_attention, ()),
    (aten._scaled_dot_product_efficient_attention, (None, True)),
    (aten._scaled_dot_product_cudnn_attention, (None, True)),
]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("operator", "more"), FORWARD, ids=str)
@pytest.mark.parametrize("groups", [1, GROUPS, HEADS])
def test_forward_multiplies_twice_by_every_head_of_the_query(operator, more, groups):
    query, key, value = operands(groups)
    assert flop_formula(operator)(query, key, value, *more, out_val=(query,)) == 2 * PRODUCT


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("groups", [1, GROUPS, HEADS])
def test_backward_multiplies_five_times(name, groups):
    operator = getattr(aten, f"_scaled_dot_product_{name}_attention_backward")
    query, key, value = operands(groups)
    assert flop_formula(operator)(query, query, key, value, None, out_val=(query, key, value)) == 5 * PRODUCT


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("queries", "keys", "seen"), [(16, 16, 136), (16, 4, 58), (4, 16, 10)])
def test_what_a_causal_mask_hides_is_not_multiplied(queries, keys, seen):
    query, key = (torch.empty(BATCH, HEADS, length, WIDTH) for length in (queries, keys))
    for operator, named in (
        (aten._scaled_dot_product_flash_attention_for_cpu, {}),
        (FORWARD[0][0], {"is_causal": True}),
    ):
        more = () if named else (0.0, True)
        counted = flop_formula(operator)(query, key, key, *more, **named, out_val=(query,))
        assert counted == 2 * 2 * BATCH * HEADS * WIDTH * seen


def test_attention_on_the_cpu_counts_forward_and_backward():
    query = torch.randn(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert counter.get_total_flops() == 7 * PRODUCT


@pytest.mark.usefixtures("fake")
def test_heads_that_no_kernel_takes_are_refused():
    query, key, value = operands(groups=3)
    with pytest.raises(AssertionError, match="shapes|heads"):
        flop_formula(aten._scaled_dot_product_flash_attention)(query, key, value, out_val=(query,))


def test_what_is_registered_later_is_found(monkeypatch):
    from torch.utils.flop_counter import flop_registry

    packet = aten.cdist
    assert flop_formula(packet) is None
    monkeypatch.setitem(flop_registry, packet, len)
    assert flop_formula(packet) is len


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
def test_a_recurrent_layer_in_one_kernel_counts_what_its_steps_do(options):
    """oneDNN runs all steps of a layer in one kernel; without it every product is an operator of its own."""
    rnn, x = torch.nn.LSTM(8, 16, **options), torch.randn(5, 3, 8, requires_grad=True)
    layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    state = tuple(torch.zeros(layers, 3, 16, requires_grad=True) for _ in range(2))
    counted = []
    for fused in (True, False):
        with (
            torch.backends.mkldnn.flags(enabled=fused),
            FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter,
        ):
            rnn(x, state)[0].sum().backward()
        counted.append(counter.get_total_flops())
        operators = {str(operator) for operator in counter.get_flop_counts()["Global"]}
        if torch.backends.mkldnn.is_available():
            assert any("mkldnn_rnn_layer" in name for name in operators) == fused
    assert counted[0] == counted[1] > 0


@pytest.mark.usefixtures("fake")
def test_cudnn_takes_the_weights_of_all_layers_in_a_list():
    x = torch.empty(5, 3, 8)
    weights = [torch.empty(64, 8), torch.empty(64, 16), torch.empty(64), torch.empty(64)]
    forward = flop_formula(aten._cudnn_rnn)(x, weights, 4, None, out_val=(x,))
    assert forward == 2 * 5 * 3 * 64 * (8 + 16)
    assert flop_formula(aten._cudnn_rnn_backward)(x, weights, 4, None, out_val=(x,)) == 2 * forward


def test_products_that_dequantize_their_weights_count() -> None:
    """bitsandbytes 0.50 multiplies by 4-bit weights in one operator, of which a step's FLOPs missed all."""
    pytest.importorskip("bitsandbytes")
    left, out = torch.ones(2, 8, 16), torch.ones(2, 8, 32)
    assert flop_formula(torch.ops.bitsandbytes.gemm_4bit)(left, None, [32, 16], out_val=out) == 2 * 16 * 16 * 32
