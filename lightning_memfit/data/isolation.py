"""`refuse_mixing`: whether a model keeps packed conversations apart, tried on the model itself.

Which attention does so depends on the model, on transformers' version and on the size of the micro-batch (its flash
attention reads packing off position ids for one sample only).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_LENGTH = 8


def refuse_mixing(module: nn.Module, like: torch.Tensor) -> None:
    """Try a pair of short conversations: if the first one changes, the second one's logits must not.

    Masked scores count for exactly nothing, but kernels that group the tokens of several samples, as those of experts
    do, round by what else is there. How much that is, another sample tells, which no model mixes with this one: a first
    conversation that moves the second one ten times as far is seen by it.

    The model is called as `module(input_ids=..., position_ids=...)` in evaluation mode, without gradients or
    compilation; nothing of it changes.

    Args:
        module: The model, whose output is logits `(batch, length, vocabulary)` or has them as `.logits`.
        like: `(batch, length)` ids of a batch in training: their device, and one or several samples.

    Raises:
        ValueError: If conversations see each other, or the model can't be called so.
    """
    ids, num_ids = torch.arange(_LENGTH, device=like.device, dtype=like.dtype), max(2, int(like.max()) + 1)
    first, other, second = ids % num_ids, torch.full_like(ids, num_ids - 1), (3 * ids + 1) % num_ids
    others = [other, torch.zeros_like(ids), first.flip(0)]
    training = {part: part.training for part in module.modules()}
    module.eval()

    def moved(beginnings: list[torch.Tensor], changed: list[torch.Tensor]) -> float:
        """Return by how much the first sample's second conversation changes, beyond the last digit of its logits."""
        before, after = (_logits_of_second(module, begin, second) for begin in (beginnings, changed))
        change, last_digit = (before - after).abs().max(), torch.finfo(before.dtype).eps * before.abs().max()
        return float(change) if change > last_digit else 0.0

    def is_mixing(size: int) -> bool:
        effect = moved([first] * size, [other, first][:size])
        rounding = max(moved([first, first], [first, one]) for one in others)  # in any case: ranks run alike
        return effect > 0 and effect > 10 * rounding

    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if is_mixing(min(2, len(like))):
                raise ValueError(_refusal(module, len(like) > 1 and not is_mixing(1)))
    finally:
        for part, was_training in training.items():
            part.training = was_training


def _logits_of_second(module: nn.Module, beginnings: list[torch.Tensor], second: torch.Tensor) -> torch.Tensor:
    """Return logits of the second conversation of the first sample, `(length, vocabulary)`."""
    ids = torch.stack([torch.cat([begin, second]) for begin in beginnings])
    positions = torch.arange(_LENGTH, device=ids.device).repeat(2).expand(len(ids), -1)
    return _logits(module, ids, positions)[0, _LENGTH:]


def _logits(module: nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    try:
        output: Any = module(input_ids=ids, position_ids=positions.contiguous())
        logits = output if isinstance(output, torch.Tensor) else output.logits
    except (TypeError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"`packing=True`: whether {type(module).__name__} keeps packed conversations apart can't be tried "
            f"({error}). Give it a `forward(input_ids, position_ids)` that returns logits, or set `packing: false`."
        ) from error
    assert isinstance(logits, torch.Tensor)
    return logits


def _refusal(module: nn.Module, is_apart_alone: bool) -> str:
    named = {type(part).__name__: kind for part in module.modules() if (kind := _attention(part)) is not None}
    name = next(iter(named), type(module).__name__)  # the outermost is the whole model
    kinds = set(named.values())
    with_kind = f" with attention {', '.join(map(repr, sorted(kinds)))}" if kinds else ""
    fixes = ["set `data.packing: false`, which gives every conversation a block of its own"]
    if kinds - {"sdpa", "eager"}:
        fixes.insert(0, "set `model.attn_implementation: sdpa`")
    if is_apart_alone:
        fixes.insert(0, "set `data.batch_size: 1`, where it keeps them apart")
    return (
        f"`packing=True`: {name}{with_kind} lets packed conversations see each other: the second of two "
        f"changes with the first. To train on them, {', or '.join(fixes)}."
    )


def _attention(part: nn.Module) -> str | None:
    kind = getattr(getattr(part, "config", None), "_attn_implementation", None)
    return kind if isinstance(kind, str) else None
