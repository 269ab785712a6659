"""`Shortage`: what follows when memory runs out: a smaller micro-batch, recomputation, or an error."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.fitting.recovery.last_resort import Recomputation
from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.fitting.size.sizes import MicroBatchSize
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.split import BatchSplitter
from lightning_memfit.reliability.consensus import RankConsensus

if TYPE_CHECKING:
    from lightning_memfit.fitting.size.shapes import ShapeGuard

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
_HINT = "`MicroBatching(last_resort='recompute')` recomputes activations before it gives up."
_NOTHING_SMALLER = (
    "It was one sample at a time: resume from the last checkpoint with `ActivationCheckpointing`, shorter samples, or "
    "a strategy that keeps less on the device."
)


def _do_nothing() -> None:
    """Run nothing."""


class Shortage:
    """Lowers what a step needs, on all ranks alike, and says why if nothing is left."""

    def __init__(
        self,
        loop: MicroBatchLoop,
        splitter: BatchSplitter,
        sizes: MicroBatchSize,
        recomputes: bool,
        consensus: RankConsensus,
        on_change: Callable[[int, str], None],
    ) -> None:
        self._loop = loop
        self._splitter = splitter
        self._sizes = sizes
        self._recomputation = Recomputation(loop.module, recomputes, consensus)
        self._on_change = on_change
        self._hint = "" if recomputes else _HINT
        self.close = self._recomputation.close

    def need_less(self, request: StepRequest, size: int, message: str, error: Exception | None) -> None:
        """Lower the micro-batch after `size` failed, or recompute if it is one sample.

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

    def ending(self, request: StepRequest, size: int, error: Exception, shapes: "ShapeGuard | None") -> MemoryExhausted:
        """Say why a batch can't be repeated, and with which size `fit` can go on from the last checkpoint."""
        why = _NOT_REPEATED if self._loop.engine is not None else _NOT_TOGETHER
        smaller = self._sizes.shrink(size)
        if smaller and shapes is not None:
            smaller = shapes.size_for(request.batch, smaller)
        fix = _RESUME.format(smaller, size) if smaller else _NOTHING_SMALLER
        return MemoryExhausted(f"{why} {fix} {str(error).splitlines()[0]}")

    def _explain(self, request: StepRequest) -> str:
        """Run one sample once more and return what fills the memory."""
        from lightning_memfit.fitting.recovery.postmortem import explain

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
