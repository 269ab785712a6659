"""Cross-entropy of a head's logits, computed in chunks of positions, so that all logits never exist at once.

The gradients of a chunk are computed in the forward pass, while its logits exist (as in Liger Kernel, Hsu et al., 2024,
arXiv 2410.10989): nothing is recomputed. `F.linear_cross_entropy` of torch 2.13 does the same, but it is missing from
the older versions supported here and does not follow autocast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    num_chunks: int = 8,
    label_smoothing: float = 0.0,
    change: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sum of `cross_entropy(linear(hidden, weight, bias).float(), target)` over the tokens that count.

    Loss and gradients equal those of the whole computation up to the order of additions. Autocast is followed. The
    gradient of `weight` is accumulated in the weight's dtype. One backward pass per call; no second derivatives. If no
    token counts, loss and gradients are zero.

    Args:
        hidden: `(batch, length, width)`.
        weight: `(classes, width)`.
        target: `(batch, length)`, integers.
        bias: `(classes,)`.
        ignore_index: Tokens with this target do not count.
        num_chunks: The length is cut into this many chunks, of which one has logits at a time. Because the cut is along
            the length, what a step allocates stays proportional to the batch.
        label_smoothing: As in `F.cross_entropy`.
        change: What is done to logits, `(tokens, classes)`, before the loss, such as a soft cap. It treats each token
            alike, and gives no gradient to anything but the logits.

    Returns:
        A scalar in float32; in float64 if the inputs are.

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
    result: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        bias,
        target,
        ignore_index,
        max(1, -(-hidden.shape[1] // num_chunks)),
        label_smoothing,
        change,
        torch.is_grad_enabled(),
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
        label_smoothing: float,
        change: Callable[[Tensor], Tensor] | None,
        with_gradients: bool,
    ) -> Tensor:
        device = hidden.device.type
        is_cast = torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64
        dtype = torch.get_autocast_dtype(device) if is_cast else hidden.dtype
        needed = [with_gradients and need for need in ctx.needs_input_grad[:3]]
        parameters = (hidden, weight, bias)
        gradients = [
            torch.zeros_like(value) if need and value is not None else None
            for need, value in zip(needed, parameters, strict=True)
        ]
        exact = torch.promote_types(dtype, torch.float32)
        total = hidden.new_zeros((), dtype=exact)
        with torch.autocast(device, enabled=False):
            head = weight.to(dtype)
            offset = None if bias is None else bias.to(dtype)
            for start in range(0, hidden.shape[1], chunk_length):
                columns = slice(start, start + chunk_length)
                inputs = hidden[:, columns].reshape(-1, hidden.shape[2]).to(dtype)
                logits = F.linear(inputs, head, offset)
                changed = None if change is None else _changed(change, logits, dtype if is_cast else None)
                if changed is None:
                    slope = logits = logits.to(exact)  # what was cast is freed
                else:
                    slope = changed.detach().to(exact, copy=True)
                total += _loss_to_gradient(slope, target[:, columns].reshape(-1), ignore_index, label_smoothing)
                if changed is not None and any(needed):
                    (slope,) = torch.autograd.grad(changed, logits, slope.to(changed.dtype))
                _accumulate(gradients, slope, inputs, head, columns)
                del logits, changed, slope  # or two chunks' logits would be alive at a time
        ctx.gradients = gradients
        return total

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "ChunkedLoss and `linear_cross_entropy` give the gradients of a loss once, and this is its second "
                "backward pass. Compute the loss again for it, or leave ChunkedLoss out."
            )
        gradients: list[Tensor | None] = ctx.gradients
        ctx.gradients = None
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(grad_outputs[0])
        return (*gradients, None, None, None, None, None, None)


def _changed(change: Callable[[Tensor], Tensor], logits: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Changed logits, with a graph back to the logits that no checkpointing or offloading around it takes part in."""
    saved_here = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    cast = torch.autocast(logits.device.type, dtype=autocast, enabled=autocast is not None)
    with torch.enable_grad(), saved_here, cast:
        return change(logits.requires_grad_())


def _loss_to_gradient(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float = 0.0) -> Tensor:
    """Return the summed loss and turn `logits` into its gradient in place.

    The gradient is softmax minus the target's distribution: one-hot, or with label smoothing (Szegedy et al., 2016,
    arXiv 1512.00567) `1 - smoothing` of that and the rest spread over all classes.
    """
    counts = (target != ignore_index).unsqueeze(1)
    index = torch.where(counts, target.unsqueeze(1), 0)
    maximum = logits.amax(dim=1, keepdim=True)
    right = logits.gather(1, index)
    if smoothing:
        right = (1 - smoothing) * right + smoothing * logits.mean(dim=1, keepdim=True)
    sums = logits.sub_(maximum).exp_().sum(dim=1, keepdim=True)
    losses = sums.log() + maximum - right
    logits.div_(sums)
    if smoothing:
        logits.sub_(smoothing / logits.shape[1])
    logits.scatter_add_(1, index, torch.full_like(right, smoothing - 1.0))
    logits.masked_fill_(~counts, 0.0)  # a factor of 0 would leave the NaN of a token that doesn't count
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
