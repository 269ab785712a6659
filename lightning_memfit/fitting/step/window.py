"""`Window`: what the loader batches of one optimizer step weigh together, over all ranks.

Every loss is divided so that the gradients add up to those of the mean over the effective batch: all micro-batches, all
ranks, all loader batches of a window of `accumulate_grad_batches`. The weight of a window is known only at its end:
until then the first batch is assumed for all, and if they differ the gradients are corrected by one factor.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_memfit.fitting.recovery.rollback import RollbackPoint
from lightning_memfit.fitting.step.loop import Fitting, StepRequest
from lightning_memfit.fitting.step.loss_weights import LocalBatch
from lightning_memfit.fitting.step.split import KeptBatch
from lightning_memfit.reliability.consensus import At, require_as_many_batches

_UNEQUAL = (
    "The ranks' batches make {} micro-batches. ZeRO communicates in every forward or backward, so that all ranks must "
    "run equally many: let the loaders of all ranks deliver equally many samples (`drop_last=True`)."
)
_EQUAL = 1e-9


@dataclass
class PastBatch:
    """An earlier loader batch of a window of `accumulate_grad_batches`, in host memory as it was before its step."""

    arguments: "OrderedDict[str, Any]"
    kept: KeptBatch
    local_batch: LocalBatch
    start: RollbackPoint


class Window:
    """The loader batches of one optimizer step.

    Attributes:
        past: Batches of the window that are complete.
        is_risky: Whether an attempt may fail on some rank, or ranks run different numbers of micro-batches.
        checked_rank: The first rank that needs a check.
    """

    def __init__(self, fitting: Fitting) -> None:
        self._loop, self._weights, self._consensus = fitting.loop, fitting.weights, fitting.consensus
        self._is_sharded = self._loop.is_sharded
        self._total = 0.0
        self._of_batch = 0.0
        self._reference = 1.0
        self.past: list[PastBatch] = []
        self.is_risky = False
        self.checked_rank = 0

    def begin(self, request: StepRequest, local_batch: LocalBatch, needed: bool, num_parts: int) -> bool:
        """Add the weight of a batch, over all ranks; return whether any rank needs a check."""
        if request.zero_grad is not None:
            self.past.clear()
            self._total = 0.0
        self._of_batch = 0.0
        return self.weigh(request, local_batch, needed, num_parts)

    def weigh(self, request: StepRequest, local_batch: LocalBatch, needed: bool = False, num_parts: int = 0) -> bool:
        """Replace the weight of the batch; return whether any rank needs a check.

        Sharded, an attempt is risky for all ranks if it is for one, or if they run different numbers of micro-batches.
        """
        total = local_batch.weight
        if self._consensus.world_size > 1:
            is_last = self._loop.is_last_of_epoch
            told = self._consensus.exchange(total, needed, -1 if self.is_risky else num_parts, is_last, at=At.BATCH)
            require_as_many_batches([last for *_, last in told], self._loop.num_batches, "limit_train_batches")
            total, needed = sum(theirs for theirs, *_ in told), any(theirs for _, theirs, *_ in told)
            if num_parts and self._is_sharded:
                self.is_risky = any(parts != num_parts for _, _, parts, _ in told)
            if self.is_risky and self._loop.engine is not None:
                counts = ", ".join(str(int(parts)) for _, _, parts, _ in told)
                raise MisconfigurationException(_UNEQUAL.format(counts))
            self.checked_rank = next((rank for rank, (_, theirs, *_) in enumerate(told) if theirs), 0)
        if request.zero_grad is not None:
            self._reference = (total or 1.0) * self._loop.trainer.accumulate_grad_batches
        self._total += total - self._of_batch
        self._of_batch = total
        return needed

    def weigh_past_again(self) -> bool:
        """Weigh the earlier batches of the window by the rules that a check on this one has left.

        Returns whether they have to be run again: their gradients are there, and no one factor makes them those of the
        new weights. On all ranks alike.
        """
        if not self.past or self._weights.is_users:
            return False
        totals: list[float] = []
        factors: list[float] = []
        for past in self.past:
            before, batch = past.local_batch.weight, past.kept.batch
            past.local_batch = self._weights.read(batch, past.local_batch.num_samples)
            now = 1.0 if self._weights.is_sum else past.local_batch.weight
            told = self._consensus.exchange(now, before, at=At.BATCH)
            totals.append(sum(theirs for theirs, _ in told))
            factors += [theirs / old if old else math.inf for theirs, old in told if theirs or old]
        self._reference = (totals[0] or 1.0) * self._loop.trainer.accumulate_grad_batches
        self._total = sum(totals) + self._of_batch
        least, most = min(factors, default=1.0), max(factors, default=1.0)
        return not (0.0 < least <= most < math.inf and most - least <= _EQUAL * most)

    def divisor(self, weight: float) -> float:
        """Return the divisor that makes a mean over `weight` tokens or samples a part of the effective batch's mean."""
        num_ranks = self._consensus.world_size
        if self._weights.is_sum:
            return float(self._loop.trainer.accumulate_grad_batches * (1 if self._is_sharded else num_ranks))
        if not weight:
            return 1.0
        return self._reference / weight / (num_ranks if self._is_sharded else 1)

    def factor(self, local_batch: LocalBatch) -> float:
        """Return the factor from the sum of a batch's divided losses to the loss that Lightning reports."""
        return self.divisor(local_batch.weight) / self._loop.trainer.accumulate_grad_batches

    def correct(self) -> None:
        """Multiply the gradients of a complete window so that they are those of its mean."""
        if self._total == self._reference or not self._total or self._weights.is_sum:
            return
        grads: list[Tensor] = [p.grad for p in self._loop.module.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, self._reference / self._total)
