"""Closed forms of Korthikanti et al. 2022 (equations 1 to 4, table 2), against which traces are held.

They assume half precision, attention without a fused kernel, a feed-forward width of four times the hidden size and
dropout after attention and feed-forward, with masks of one byte. Fused attention keeps neither scores nor
probabilities, which is the `selective` case.
"""

from typing import Literal


def layer_activation_bytes(
    micro_batch_size: int,
    sequence_length: int,
    hidden_size: int,
    num_heads: int,
    recompute: Literal["none", "selective", "full"] = "none",
    tensor_parallel_size: int = 1,
) -> int:
    """Bytes that one layer keeps for backward, per rank.

    Args:
        micro_batch_size: Samples, b.
        sequence_length: Tokens per sample, s.
        hidden_size: Width, h.
        num_heads: Attention heads, a.
        recompute: `none` keeps all, `s·b·h·(34 + 5·a·s/h)`; `selective` recomputes attention, `34·s·b·h`; `full`
            keeps the layer's input, `2·s·b·h`.
        tensor_parallel_size: Ranks t that compute the layer together. They divide what lies inside attention and
            feed-forward, `24·s·b·h` and the scores, and each keep the other `10·s·b·h`.
    """
    tokens = micro_batch_size * sequence_length * hidden_size
    scores = 5 * num_heads * sequence_length * sequence_length * micro_batch_size
    if recompute == "full":
        return 2 * tokens
    inside = 24 * tokens + (scores if recompute == "none" else 0)
    return 10 * tokens + -(-inside // tensor_parallel_size)
