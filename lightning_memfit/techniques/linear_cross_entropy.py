"""Cross-entropy of a linear head, computed in chunks of positions, so that all logits never exist at once.

The gradients of a chunk are computed in the forward pass, while its logits exist (as in Liger Kernel, Hsu et al., 2024,
arXiv 2410.10989): nothing is recomputed. `F.linear_cross_entropy` of torch 2.13 does the same, but it is missing from
the older versions supported here and does not follow autocast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    num_chunks: int = 8,
) -> Tensor:
    """Sum of `cross_entropy(linear(hidden, weight, bias).float(), target)` over the tokens that count.

    Loss and gradients equal those of the whole computation up to the order of additions. Autocast is followed. The
    gradient of `weight` is accumulated in the weight's dtype. One backward pass per call; no second derivatives.

    Args:
        hidden: `(batch, length, width)`.
        weight: `(classes, width)`.
        target: `(batch, length)`, integers.
        bias: `(classes,)`.
        ignore_index: Tokens with this target do not count.
        num_chunks: The length is cut into this many chunks, of which one has logits at a time. Because the cut is along
            the length, what a step allocates stays proportional to the batch.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: If a shape does not fit or `num_chunks` is less than 1.
    """
    if hidden.ndim != 3 or target.shape != hidden.shape[:2] or weight.shape[1:] != hidden.shape[2:]:
        raise ValueError(
            f"`hidden` {tuple(hidden.shape)}, `weight` {tuple(weight.shape)} and `target` {tuple(target.shape)} must "
            "be (batch, length, width), (classes, width) and (batch, length)."
        )
    if num_chunks < 1:
        raise ValueError(f"`num_chunks={num_chunks}` must be at least 1.")
    chunk_length = -(-hidden.shape[1] // num_chunks)
    result: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, ignore_index, chunk_length, torch.is_grad_enabled()
    )
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        chunk_length: int,
        with_gradients: bool,
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        needed = [with_gradients and need for need in ctx.needs_input_grad[:3]]
        parameters = (hidden, weight, bias)
        gradients = [
            torch.zeros_like(value) if need and value is not None else None
            for need, value in zip(needed, parameters, strict=True)
        ]
        total = hidden.new_zeros((), dtype=torch.float32)
        with torch.autocast(device, enabled=False):
            head = weight.to(dtype)
            offset = None if bias is None else bias.to(dtype)
            for start in range(0, hidden.shape[1], chunk_length):
                columns = slice(start, start + chunk_length)
                inputs = hidden[:, columns].reshape(-1, hidden.shape[2]).to(dtype)
                logits = F.linear(inputs, head, offset).float()
                total += _loss_to_gradient(logits, target[:, columns].reshape(-1), ignore_index)
                _accumulate(gradients, logits, inputs, head, columns)
                del logits  # or two chunks' logits would be alive at a time
        ctx.gradients = gradients
        return total

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("The gradients of linear_cross_entropy were used up by the first backward pass.")
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(grad_outputs[0])
        return (*gradients, None, None, None, None)


def _loss_to_gradient(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the summed loss and turn `logits` into its gradient, softmax minus one-hot, in place."""
    counts = (target != ignore_index).unsqueeze(1)
    index = torch.where(counts, target.unsqueeze(1), 0)
    maximum = logits.amax(dim=1, keepdim=True)
    right = logits.gather(1, index)
    sums = logits.sub_(maximum).exp_().sum(dim=1, keepdim=True)
    losses = sums.log() + maximum - right
    logits.div_(sums).scatter_add_(1, index, torch.full_like(right, -1.0)).mul_(counts)
    return torch.where(counts, losses, 0.0).sum()


def _accumulate(gradients: list[Tensor | None], slope: Tensor, inputs: Tensor, head: Tensor, columns: slice) -> None:
    """Add one chunk's gradients; for float16, which could overflow before the loss scale is known, in float32."""
    dtype = torch.float32 if inputs.dtype is torch.float16 else inputs.dtype
    of_hidden, of_weight, of_bias = gradients
    if of_bias is not None:
        of_bias += slope.sum(dim=0)
    slope, inputs = slope.to(dtype), inputs.to(dtype)
    if of_hidden is not None:
        part = of_hidden[:, columns]
        part.copy_((slope @ head.to(dtype)).view_as(part))
    if of_weight is None:
        return
    if of_weight.dtype is dtype:
        of_weight.addmm_(slope.t(), inputs)
    else:
        of_weight += slope.t() @ inputs
