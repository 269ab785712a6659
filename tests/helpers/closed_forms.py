"""Closed forms of the papers, against which traces are held.

Activations: Korthikanti et al. 2022, equations 1 to 4, table 2. They assume half precision, attention without a fused
kernel, a feed-forward width of four times the hidden size and dropout after attention and feed-forward, with masks of
one byte. Fused attention keeps neither scores nor probabilities, which is the `selective` case.
"""

from typing import Literal


def layer_activation_bytes(
    micro_batch_size: int,
    sequence_length: int,
    hidden_size: int,
    num_heads: int,
    recompute: Literal["none", "selective", "full"] = "none",
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
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
        sequence_parallel: The others are divided, too, along the sequence. Our strategies don't; Megatron-LM does.

    Raises:
        ValueError: If a size is not positive, `recompute` is unknown, or t does not divide the heads.
    """
    sizes = {
        "micro_batch_size": micro_batch_size,
        "sequence_length": sequence_length,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "tensor_parallel_size": tensor_parallel_size,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"`{name}={value}` must be at least 1.")
    if num_heads % tensor_parallel_size:
        raise ValueError(f"`tensor_parallel_size={tensor_parallel_size}` must divide `num_heads={num_heads}`.")
    tokens = micro_batch_size * sequence_length * hidden_size
    scores = 5 * num_heads * sequence_length * sequence_length * micro_batch_size
    if recompute == "full":
        return 2 * tokens
    if recompute not in ("none", "selective"):
        raise ValueError(f"`recompute={recompute!r}` must be none, selective or full.")
    outside, inside = 10 * tokens, 24 * tokens + (scores if recompute == "none" else 0)
    if sequence_parallel:
        return -(-(outside + inside) // tensor_parallel_size)
    return outside + -(-inside // tensor_parallel_size)
