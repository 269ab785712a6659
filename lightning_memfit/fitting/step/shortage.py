"""`Shortage`: what follows when memory runs out: a smaller micro-batch, recomputation, or an error."""

from collections.abc import Callable

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_memfit.fitting.recovery.last_resort import Recomputation
from lightning_memfit.fitting.recovery.postmortem import explain
from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.fitting.size.device_memory import allocation_retries
from lightning_memfit.fitting.size.shapes import ShapeGuard
from lightning_memfit.fitting.size.sizes import MicroBatchSize
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.split import BatchSplitter
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.reliability.consensus import At, RankConsensus

_NOT_TOGETHER = (
    "Memory ran out on this rank, which communicates with others inside the step: to stop and repeat it together takes "
    "FSDP2 (`memfit_fsdp2`) and torch 2.13."
)
_NOT_REPEATED = (
    "Memory ran out in a step under ZeRO, which can't be repeated: DeepSpeed has reduced a part of its gradients."
)
_RESUME = (
    "Resume from the last checkpoint with `MicroBatching(micro_batch_size={})`, which should fit where {} didn't; the "
    "effective batch stays the same."
)
_NOTHING_SMALLER = (
    "It was one sample at a time: resume from the last checkpoint with `ActivationCheckpointing`, shorter samples, or "
    "a strategy that keeps less on the device."
)
_STEPS_BETWEEN_CHECKS = 16
_MANY_RETRIES = 4


def _do_nothing() -> None:
    """Run nothing."""


class Shortage:
    """Lowers what a step needs, on all ranks alike, and says why if nothing is left.

    Args:
        loop: Runs forward and backward.
        splitter: Splits batches.
        sizes: The micro-batch size in use.
        recomputation: Makes one sample need less memory.
        consensus: Communication between the ranks.
        on_change: Called with the new micro-batch size and the reason.
        hint: What would help, for the error when nothing is left.
    """

    def __init__(
        self,
        loop: MicroBatchLoop,
        splitter: BatchSplitter,
        sizes: MicroBatchSize,
        recomputation: Recomputation,
        consensus: RankConsensus,
        on_change: Callable[[int, str], None],
        hint: str,
    ) -> None:
        self._loop = loop
        self._splitter = splitter
        self._sizes = sizes
        self._recomputation = recomputation
        self._consensus = consensus
        self._on_change = on_change
        self._hint = hint
        self._device: torch.device = loop.trainer.strategy.root_device
        self._is_cached = DeviceKind.of(self._device).has_caching_allocator
        self._retries = allocation_retries(self._device)  # those of before training

    def need_less(self, request: StepRequest, size: int, message: str, error: Exception | None) -> None:
        """Lower the micro-batch, or recompute if it is one sample.

        Args:
            request: The step.
            size: The micro-batch size that failed.
            message: What the error said.
            error: The error; None if it happened on another rank.

        Raises:
            torch.OutOfMemoryError: If nothing is left.
        """
        smaller = self._sizes.shrink(size)
        done = None if smaller else self._recomputation.start()
        if smaller:
            rank_zero_warn(f"Memory ran out with micro-batch {size}: the effective batch is repeated with {smaller}.")
            self._on_change(smaller, message)
        elif done:
            rank_zero_warn(f"Memory ran out with one sample: the effective batch is repeated, from now on with {done}.")
            self._on_change(self._sizes.current, f"from now on with {done}")
        else:
            is_whole = self._splitter.count(request.batch) == 1
            what = "A batch of one sample, which is never cut," if is_whole else "A micro-batch of one sample"
            raise MemoryExhausted(
                f"{what} does not fit{self._recomputation.summary()} {message}\n{self._explain(request)}"
            ) from error
        self._retries = allocation_retries(self._device)  # the size has been lowered for these

    def ending(self, request: StepRequest, size: int, error: Exception, shapes: ShapeGuard | None) -> MemoryExhausted:
        """Say why a batch can't be repeated, and with which size `fit` can go on from the last checkpoint."""
        why = _NOT_REPEATED if self._loop.engine is not None else _NOT_TOGETHER
        smaller = self._sizes.shrink(size)
        if smaller and shapes is not None:
            smaller = shapes.size_for(request.batch, smaller)
        fix = _RESUME.format(smaller, size) if smaller else _NOTHING_SMALLER
        return MemoryExhausted(f"{why} {fix} {str(error).splitlines()[0]}")

    def _explain(self, request: StepRequest) -> str:
        """Run one sample once more and return what fills the memory."""
        hook_name = self._loop.module._current_fx_name
        count = self._splitter.count(request.batch)
        part = self._splitter.split(request.batch, [1, count - 1] if count > 1 else [1])[0]

        def run() -> None:
            loss = self._loop.forward(request, part, 1.0).closure_loss
            if loss is not None:
                self._loop.backward(request, loss, announce=False)

        if self._loop.is_sharded:
            run = _do_nothing  # in which ranks would have to communicate
        text = explain(self._loop.module, self._loop.trainer.optimizers, run, self._hint)
        self._loop.module._current_fx_name = hook_name  # Lightning doesn't reset it when a hook raises
        return text

    def watch(self, num_steps: int) -> None:
        """Every few steps, lower the size if a caching allocator keeps emptying its cache.

        That costs far more than one more pass. All ranks lower it together, whichever of them is short: those that
        compute a batch together run equal parts.
        """
        if not self._is_cached or num_steps % _STEPS_BETWEEN_CHECKS:
            return
        before, self._retries = self._retries, allocation_retries(self._device)
        retries, current = self._retries - before, self._sizes.current
        if self._consensus.world_size > 1:
            told = self._consensus.exchange(retries, current, at=At.BATCH)
            retries = int(max(theirs for theirs, _ in told))
            current = int(min(theirs for _, theirs in told))
        if retries < _MANY_RETRIES or current <= 1:
            return
        size = self._sizes.shrink(current)
        if self._consensus.world_size > 1:
            size = self._sizes.current = int(min(theirs for (theirs,) in self._consensus.exchange(size, at=At.BATCH)))
        rank_zero_info(f"MicroBatching: memory is so tight that the allocator is thrashing; micro-batch {size} now.")
        self._on_change(size, f"{retries} allocation retries in {_STEPS_BETWEEN_CHECKS} steps")
