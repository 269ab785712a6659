"""Activation memory of a transformer layer in closed form (Korthikanti et al. 2022, equations 1, 2 and section 5).

The formulae assume half precision, attention without a fused kernel, a feed-forward width of four times the hidden size
and dropout after attention and feed-forward, with masks of one byte. Fused attention keeps neither scores nor
probabilities, which is the `selective` case. Estimates of real modules come from their trace, not from here.
"""

from typing import Literal


def layer_activation_bytes(
    micro_batch_size: int,
    sequence_length: int,
    hidden_size: int,
    num_heads: int,
    recompute: Literal["none", "selective", "full"] = "none",
) -> int:
    """Bytes that one layer keeps for backward.

    Args:
        micro_batch_size: Samples, b.
        sequence_length: Tokens per sample, s.
        hidden_size: Width, h.
        num_heads: Attention heads, a.
        recompute: `none` keeps all, `s·b·h·(34 + 5·a·s/h)`; `selective` recomputes attention, `34·s·b·h`; `full`
            keeps the layer's input, `2·s·b·h`.

    Raises:
        ValueError: If a size is not positive or `recompute` is unknown.
    """
    sizes = {
        "micro_batch_size": micro_batch_size,
        "sequence_length": sequence_length,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"`{name}={value}` must be at least 1.")
    tokens = micro_batch_size * sequence_length * hidden_size
    if recompute == "none":
        return 34 * tokens + 5 * num_heads * sequence_length * sequence_length * micro_batch_size
    if recompute == "selective":
        return 34 * tokens
    if recompute == "full":
        return 2 * tokens
    raise ValueError(f"`recompute={recompute!r}` must be none, selective or full.")


def checkpointed_segments(num_layers: int) -> int:
    """Number of checkpointed segments that keeps least, the square root of the depth (Chen et al. 2016)."""
    if num_layers < 1:
        raise ValueError(f"`num_layers={num_layers}` must be at least 1.")
    return max(1, round(num_layers**0.5))
