"""`refuse_mixing`: whether a model keeps packed conversations apart, tried on the model itself.

Which attention does so depends on the model, on transformers' version and on the size of the micro-batch (its flash
attention reads packing off position ids for one sample only).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_memfit.memory.modes import evaluating

_LENGTH = 8


def refuse_mixing(module: nn.Module, like: torch.Tensor) -> None:
    """Try a pair of short conversations: if the first one changes, the second one's logits must not.

    Kernels that group the tokens of several samples, as those of experts do, round by what else is there. That rounding
    is measured with another sample of the batch; conversations count as mixed if the effect is ten times larger.

    The model is called as `module(input_ids=..., position_ids=...)` in evaluation mode, without gradients or
    compilation; nothing of it changes.
    """
    ids, num_ids = torch.arange(_LENGTH, device=like.device, dtype=like.dtype), max(2, int(like.max()) + 1)
    first, other, second = ids % num_ids, torch.full_like(ids, num_ids - 1), (3 * ids + 1) % num_ids
    others = [other, torch.zeros_like(ids), first.flip(0)]

    def moved(beginnings: list[torch.Tensor], changed: list[torch.Tensor]) -> float:
        """Return by how much the first sample's second conversation changes, beyond the last digit of its logits."""
        before, after = (
            _logits(module, [torch.cat([one, second]) for one in begin]) for begin in (beginnings, changed)
        )
        change, last_digit = (before - after).abs().max(), torch.finfo(before.dtype).eps * before.abs().max()
        return float(change) if change > last_digit else 0.0

    with evaluating(module), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        size = min(2, len(like))
        effect = moved([first] * size, [other, first][:size])
        rounding = max(moved([first, first], [first, one]) for one in others)  # in any case: ranks run alike
    if effect > 10 * rounding:
        attention = getattr(getattr(getattr(module, "network", module), "config", None), "_attn_implementation", None)
        name = type(getattr(module, "network", module)).__name__
        raise ValueError(
            f"`packing=True`: {name}{f' with attention {attention!r}' if attention else ''} lets packed conversations "
            "see each other: the second of two changes with the first. Set `data.packing: false`, which gives every "
            "conversation a block of its own, or `model.attn_implementation: sdpa` if it is another one; flash "
            "attention keeps them apart with `data.batch_size: 1`."
        )


def _logits(module: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return logits of the second conversation of the first sample, `(length, vocabulary)`."""
    ids = torch.stack(rows)
    positions = torch.arange(_LENGTH, device=ids.device).repeat(2).expand(len(ids), -1).contiguous()
    try:
        output: Any = module(input_ids=ids, position_ids=positions)
        logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    except (TypeError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"`packing=True`: whether {type(module).__name__} keeps packed conversations apart can't be tried "
            f"({error}). Give it a `forward(input_ids, position_ids)` that returns logits, or set `packing: false`."
        ) from error
    return logits[0, _LENGTH:]
