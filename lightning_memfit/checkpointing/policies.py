"""Policies of activation checkpointing: the modes that people name, and the choice per block that each means."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Choice = Literal["none", "full", "keep_attention", "keep_matmul", "keep_matmul_attention", "offload"]
"""`none` keeps all activations of a block, `full` only its inputs, `keep_...` its inputs and the outputs they name;
`offload` keeps them all, in host memory."""

CHOICES: tuple[Choice, ...] = get_args(Choice)

Mode = Literal["none", "full", "every", "sqrt", "selective", "offload"]
MODES: tuple[Mode, ...] = get_args(Mode)

_aten = torch.ops.aten
# Products with weights. `bmm` is left out: in attention without a fused kernel it makes the scores, which checkpointing
# is meant to save.
MATMULS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default})
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
_KEPT: dict[Choice, frozenset[Any]] = {
    "keep_attention": ATTENTION,
    "keep_matmul": MATMULS,
    "keep_matmul_attention": MATMULS | ATTENTION,
}
Keep = Literal["attention", "matmul"]
_CHOICE_OF_KEEP: dict[frozenset[str], Choice] = {
    frozenset({"attention"}): "keep_attention",
    frozenset({"matmul"}): "keep_matmul",
    frozenset({"attention", "matmul"}): "keep_matmul_attention",
}


def choices_for(
    mode: Mode, num_blocks: int, every: int | None = None, keep: tuple[Keep, ...] = ()
) -> tuple[Choice, ...]:
    """Translate a mode to one choice per block. `sqrt` works on segments of blocks and is not one of these modes.

    Args:
        mode: `none`, `full`, `offload`, `every` (one block in `every`, beginning with the first) or `selective`.
        num_blocks: Number of blocks.
        every: Needed by `every`, at least 1.
        keep: Needed by `selective`: `attention`, `matmul` or both.

    Raises:
        ValueError: If an argument is missing, out of range, or belongs to another mode.
    """
    check_mode(mode, every, keep)
    if mode == "every":
        assert every is not None
        return tuple("full" if index % every == 0 else "none" for index in range(num_blocks))
    if mode == "selective":
        return (_CHOICE_OF_KEEP[frozenset(keep)],) * num_blocks
    if mode == "sqrt":
        raise ValueError("`mode='sqrt'` checkpoints segments of several blocks and has no choice per block.")
    return (mode,) * num_blocks


def check_mode(mode: str, every: int | None, keep: tuple[str, ...]) -> None:
    """Raise a `ValueError` unless the arguments of a mode fit together."""
    if mode not in MODES:
        raise ValueError(f"`mode={mode!r}` is unknown. Choose from {', '.join(MODES)}.")
    if (mode == "every") != (every is not None):
        raise ValueError(f"`every={every}` with `mode={mode!r}`: give `every` with mode='every', and only there.")
    if every is not None and every < 1:
        raise ValueError(f"`every={every}` must be at least 1 (1 checkpoints every block).")
    if (mode == "selective") != bool(keep):
        raise ValueError(
            f"`keep={list(keep)}` with `mode={mode!r}`: give `keep` with mode='selective', and only there."
        )
    if keep and frozenset(keep) not in _CHOICE_OF_KEEP:
        raise ValueError(f"`keep={list(keep)}` must hold 'attention', 'matmul' or both.")


def kept_operators(choice: Choice) -> frozenset[Any]:
    """Operators whose outputs a choice keeps; empty for `full`."""
    return _KEPT.get(choice, frozenset())


def selective_contexts(kept: frozenset[Any]) -> Callable[[], tuple[Any, Any]]:
    """Make the `context_fn` of `torch.utils.checkpoint` that keeps the outputs of these operators."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, kept))


def _policy(kept: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
