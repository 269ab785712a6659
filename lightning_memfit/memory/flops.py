"""FLOPs of operators, by torch's formulas also where torch's own registry refuses the shapes, and by ours beside them.

Fused attention takes fewer heads of keys and values than of queries ("grouped-query attention": Llama, Mistral, Qwen).
The formulas of torch 2.11 raise an `AssertionError` for that; those of 2.13 count what is counted here. Kernels that
run a whole recurrent layer (LSTM, GRU) have no formula there.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, shape_wrapper

aten = torch.ops.aten

_ATTENTION = {
    aten._scaled_dot_product_flash_attention: 0,
    aten._scaled_dot_product_efficient_attention: 0,
    aten._scaled_dot_product_cudnn_attention: 0,
    aten._scaled_dot_product_flash_attention_backward: 1,
    aten._scaled_dot_product_efficient_attention_backward: 1,
    aten._scaled_dot_product_cudnn_attention_backward: 1,
    aten._scaled_dot_product_flash_attention_for_cpu: 0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}
"""Fused attention and the place of the query among its arguments, which the key and the value follow."""

_COUNTED_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
"""Kernels without a formula of torch's, and those that multiply as they do."""


def _of_repeated_heads(operator: Any, query_at: int) -> Callable[..., int]:
    """The formula of torch for keys and values with as many heads as the query: the kernel multiplies each of those."""
    formula: Callable[..., int] = flop_registry[_COUNTED_AS.get(operator, operator)]

    def count(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
        query, key, value = shapes[query_at : query_at + 3]
        repeated = (_with_heads(shape, query[1]) for shape in (key, value))
        return formula(*shapes[: query_at + 1], *repeated, *shapes[query_at + 3 :], out_val=out_shape, **kwargs)

    return count


def _with_heads(shape: Any, heads: int) -> Any:
    """The shape (batch, heads, sequence, head) with its heads repeated."""
    batch, groups, length, width = shape
    # Heads that no kernel takes are left to the formula, which says so.
    return shape if heads % groups else torch.Size((batch, heads, length, width))


GROUPED_ATTENTION = {operator: _of_repeated_heads(operator, query) for operator, query in _ATTENTION.items()}
"""Formulas of shapes, as `FlopCounterMode(custom_mapping=...)` takes them."""


def _of_recurrence(times: int) -> Callable[..., int]:
    """The formula for kernels of whole recurrent layers, which torch lacks: every step multiplies by the weights.

    Args:
        times: Products for each of the forward pass: 1 there, 2 in backward.
    """

    def count(steps: Any, *weights: Any, out_shape: Any = None, **kwargs: Any) -> int:
        # oneDNN takes a layer's weights one by one, cuDNN and MIOpen those of all layers and directions in a list.
        listed = weights[0] if _is_list_of_shapes(weights[0]) else weights[:2]
        elements = sum(math.prod(shape) for shape in listed if len(shape) == 2)
        return int(2 * times * math.prod(steps[:-1]) * elements)

    return count


def _is_list_of_shapes(value: Any) -> bool:
    return bool(value) and not isinstance(value[0], int)


RECURRENCE = {
    aten.mkldnn_rnn_layer: _of_recurrence(1),
    aten.mkldnn_rnn_layer_backward: _of_recurrence(2),
    aten._cudnn_rnn: _of_recurrence(1),
    aten._cudnn_rnn_backward: _of_recurrence(2),
    aten.miopen_rnn: _of_recurrence(1),
    aten.miopen_rnn_backward: _of_recurrence(2),
}
"""Formulas of shapes, as those of `GROUPED_ATTENTION`."""

FORMULAS = {**GROUPED_ATTENTION, **RECURRENCE}
"""All formulas of shapes that torch's counter has not, or not right; by convention, attention counts whole there."""


def _without_hidden(operator: Any, query_at: int) -> Callable[..., int]:
    """The formula for what a kernel multiplies: those of attention skip blocks that a causal mask hides."""
    count: Callable[..., int] = shape_wrapper(FORMULAS[operator])
    place = [argument.name for argument in operator.default._schema.arguments].index("is_causal")

    def multiplied(*args: Any, **kwargs: Any) -> int:
        whole = count(*args, **kwargs)
        if not kwargs.get("is_causal", args[place] if len(args) > place else False):
            return whole
        queries, keys = (args[at].size(-2) for at in (query_at, query_at + 1))
        square = min(queries, keys)
        seen = square * (square + 1) // 2 + (queries - square) * keys
        return int(whole * seen // (queries * keys))

    return multiplied


_OF_TENSORS: dict[Any, Callable[..., int]] = {
    **{operator: shape_wrapper(formula) for operator, formula in RECURRENCE.items()},
    **{operator: _without_hidden(operator, query_at) for operator, query_at in _ATTENTION.items()},
}


def grouped_product_flops(left: Any, right: Any, *_: Any, out_val: torch.Tensor, **__: Any) -> int:
    """FLOPs of a grouped product, however rows are divided; torch's counter has no formula for it."""
    inner = left.size(-1)
    if left.dim() == right.dim() == 2:
        return 2 * int(left.size(0)) * int(inner) * int(right.size(1))  # groups divide what is summed over
    return 2 * out_val.numel() * int(inner)


_WITHOUT_FORMULA: dict[Any, Callable[..., int]] = {aten._grouped_mm: grouped_product_flops}
"""Operators that torch's registry lacks, called as those of `flop_formula`."""


def quantized_product_flops(left: Any, *_: Any, out_val: torch.Tensor, **__: Any) -> int:
    """FLOPs of a product with weights that its kernel dequantizes, as bitsandbytes' layers of 4 bits take it."""
    return 2 * out_val.numel() * int(left.size(-1))


_BY_NAME: dict[str, Callable[..., int]] = {"gemm_4bit": quantized_product_flops}
"""Such operators of libraries that may not be there."""


def flop_formula(operator: Any) -> Callable[..., int] | None:
    """The formula for what an operator's kernel computes; None for one without.

    It is called with the operator's arguments and `out_val`, its result.

    Args:
        operator: An operator packet, such as `torch.ops.aten.mm`.
    """
    own = _OF_TENSORS.get(operator) or flop_registry.get(operator) or _WITHOUT_FORMULA.get(operator)
    return own or _BY_NAME.get(getattr(operator, "__name__", ""))
