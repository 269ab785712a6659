"""Refuse modules whose loss is not a mean over independent samples: micro-batches would change their results.

Batch statistics are found in the module's layers; coupled losses are found by running two samples together and apart.
"""

from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_memfit.fitting.recovery.oom import is_out_of_memory, release
from lightning_memfit.fitting.recovery.rollback import RandomState, TrainingSnapshot
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.outputs import StepLogs
from lightning_memfit.fitting.step.split import BatchSplitter

_TOLERANCE = 2e-2  # bf16 losses differ by less, a sum or a contrastive loss of two samples by more


def check_batch_statistics(module: nn.Module) -> None:
    """Refuse layers that normalise with statistics of the batch.

    Raises:
        MisconfigurationException: If there is such a layer in training mode.
    """
    names = batch_statistics(module)
    if names:
        raise MisconfigurationException(
            f"{len(names)} BatchNorm layers ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}) normalise with "
            "the statistics of their batch: with micro-batches they are those of the micro-batch, and results change. "
            "Replace them by GroupNorm or LayerNorm, freeze them with `.eval()`, or accept it: "
            "`MicroBatching(allow_batch_statistics=True)`."
        )


def batch_statistics(module: nn.Module) -> list[str]:
    """Return the names of layers that normalise with statistics of the batch while training."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training
    ]


def check_independent_samples(
    loop: MicroBatchLoop, request: StepRequest, splitter: BatchSplitter, num_samples: int
) -> None:
    """Compare the loss of two samples with the weighted mean of their own losses.

    The check runs in evaluation mode and changes nothing.

    It detects in-batch contrastive losses, sums instead of means, and means over something other than their weight.
    Losses that draw random numbers even in evaluation mode (diffusion, variational) can't be checked and pass.

    Raises:
        MisconfigurationException: If the two differ.
    """
    if num_samples < 3:
        return
    pair, *_ = splitter.split(request.batch, [2, num_samples - 2])
    halves = splitter.split(pair, [1, 1])
    weights = splitter.read(pair, 2).weights_of(halves, [1, 1])
    if not all(weights):
        return
    failure: Exception | None = None
    try:
        losses = _losses(loop, request, [pair, pair, *halves])
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = error
    if failure is not None:  # two samples don't fit, so there is no check; training will find its size
        release(failure)
        return
    together, again, *apart = losses
    if together != again:
        return
    mean = sum(loss * weight for loss, weight in zip(apart, weights, strict=True)) / sum(weights)
    if abs(together - mean) > _TOLERANCE * max(abs(together), abs(mean), 1e-6):
        raise MisconfigurationException(
            f"`training_step` gives two samples a loss of {together:.6g}, but the mean of their own losses is "
            f"{mean:.6g}. Micro-batches need a mean over samples or unmasked label tokens: return a mean in place of "
            "a sum, define `loss_weight(batch)` for what the loss is a mean over, or, for in-batch contrastive losses, "
            "accept that they see a micro-batch only: `MicroBatching(allow_batch_statistics=True)`."
        )


def _losses(loop: MicroBatchLoop, request: StepRequest, batches: list[Any]) -> list[float]:
    device = loop.trainer.strategy.root_device
    snapshot = TrainingSnapshot(loop.module, (), device, with_parameters=False)
    random = RandomState(device)
    losses: list[float] = []
    try:
        loop.module.eval()
        with torch.no_grad(), StepLogs().capture(loop.results):
            for index, batch in enumerate(batches):
                if index != 1:  # the repetition draws other random numbers
                    random.restore()
                loss = loop.forward(request, batch, 1.0).loss
                losses.append(float("nan") if loss is None else float(loss))  # nan compares unequal: no verdict
    finally:
        snapshot.restore()
    return losses
