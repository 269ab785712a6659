"""One effective batch: micro-batches forward and backward, agreed upon by all ranks, repeated after a failure."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_memfit.fitting.recovery.ladder import Ladder
from lightning_memfit.fitting.recovery.oom import is_out_of_memory, release
from lightning_memfit.fitting.recovery.rollback import Rewind, RewindPoint
from lightning_memfit.fitting.size.sizes import MicroBatchSize
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.outputs import OutputMerger, StepLogs, StepMetrics
from lightning_memfit.fitting.step.ranks import Agreement, GradientReducer, broadcast_buffers
from lightning_memfit.fitting.step.split import BatchSplitter, SampleWeights, sizes_of

_OK, _OUT_OF_MEMORY, _FAILED = 0, 1, 2


@dataclass
class Share:
    """This device's part of the effective batch.

    Attributes:
        num_samples: Samples in it.
        weights: How much they count in the loss.
        global_total: Weight of the loader batches of all ranks.
    """

    num_samples: int
    weights: SampleWeights
    global_total: float


@dataclass
class _Past:
    """An earlier loader batch of a window of `accumulate_grad_batches`, its arguments in host memory."""

    arguments: "OrderedDict[str, Any]"
    share: Share
    random_and_buffers: RewindPoint


@dataclass
class StepParts:
    """What `EffectiveStep` works with.

    Attributes:
        weigh: From a batch to its share, on this rank.
        explain: Text for the error when even a micro-batch of one sample does not fit.
        ladder: Makes one sample need less.
        on_change: Called with the new micro-batch size and the reason.
        recover: Whether a failed attempt is repeated.
    """

    loop: MicroBatchLoop
    splitter: BatchSplitter
    sizes: MicroBatchSize
    agreement: Agreement
    reducer: GradientReducer | None
    rewind: Rewind
    metrics: StepMetrics
    weigh: Callable[[Any], tuple[int, SampleWeights]]
    explain: Callable[[StepRequest, Any], str]
    ladder: Ladder
    on_change: Callable[[int, str], None]
    recover: bool
    averages_ranks: bool


class EffectiveStep:
    """Run loader batches in micro-batches, so that gradients and logged values are those of the effective batch.

    Every loss is divided so that the gradients add up to those of the mean over the effective batch: all
    micro-batches, all ranks, all loader batches of a window of `accumulate_grad_batches`. The weight of a window is
    known only at its end: meanwhile the first batch stands for all, and the gradients are corrected by one factor
    before the step if they differ.

    An attempt runs every micro-batch without talking to other ranks. Then all ranks tell each other how it went, in one
    exchange of three numbers. Only if all succeeded are gradients reduced and values logged. Otherwise all of them go
    back to the start of the effective batch, take a smaller micro-batch and repeat it.

    Args:
        parts: What to work with.
    """

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self._logs = StepLogs()
        self._past: list[_Past] = []
        self._window_total = 0.0
        self._reference = 1.0
        self._is_cleared = False
        self._failed_size = 0

    def run(self, request: StepRequest) -> ClosureResult:
        """Run one loader batch; gradients are complete when it was the last of its window.

        Raises:
            torch.OutOfMemoryError: If not even one sample fits.
        """
        parts = self.parts
        share = self._share_of(request.batch)
        if request.zero_grad is not None:
            self._past.clear()
            self._is_cleared = False
            self._window_total = 0.0
            self._reference = max(share.global_total, 1e-30) * parts.loop.trainer.accumulate_grad_batches
        self._window_total += share.global_total
        point = parts.rewind.save()
        is_repeated = False
        while True:
            size = min(parts.sizes.current, share.num_samples)
            result, error = self._attempt(request, share, size, point if is_repeated else None)
            if self._all_succeeded(error, size):
                break
            self._go_back(request, error, point)
            del error
            is_repeated = True
        assert result is not None
        return self._complete(request, share, point, result)

    # --- weights ----------------------------------------------------------------------------------------------------

    def _share_of(self, batch: Any) -> Share:
        num_samples, weights = self.parts.weigh(batch)
        totals = self.parts.agreement.exchange(weights.total)
        return Share(num_samples, weights, sum(total for (total,) in totals))

    # --- an attempt -------------------------------------------------------------------------------------------------

    def _attempt(
        self, request: StepRequest, share: Share, size: int, repeat_from: RewindPoint | None
    ) -> tuple[ClosureResult | None, Exception | None]:
        try:
            if repeat_from is not None and self._past:
                self._repeat_past(request, repeat_from, size)
            return self._run_micro_batches(request, share, size), None
        except Exception as error:
            if self.parts.agreement.world_size == 1 and not (self.parts.recover and is_out_of_memory(error)):
                raise
            return None, error

    def _repeat_past(self, request: StepRequest, point: RewindPoint, size: int) -> None:
        """Run the earlier loader batches of the window again for their gradients; what they logged stands."""
        parts = self.parts
        device = parts.loop.trainer.strategy.root_device
        for past in self._past:
            parts.rewind.load(past.random_and_buffers)
            arguments = OrderedDict((k, move_data_to_device(v, device)) for k, v in past.arguments.items())
            again = replace(request, arguments=arguments, zero_grad=None, is_last=False)
            self._run_micro_batches(again, past.share, min(size, past.share.num_samples), announce=False)
            self._logs.clear()
        parts.rewind.load(point)

    def _run_micro_batches(self, request: StepRequest, share: Share, size: int, announce: bool = True) -> ClosureResult:
        parts, loop = self.parts, self.parts.loop
        sizes = sizes_of(share.num_samples, size)
        batches = parts.splitter.split(request.batch, sizes)
        weights = share.weights.of_parts(batches, sizes)
        last_counted = len(weights) - 1
        while last_counted and not weights[last_counted]:
            last_counted -= 1
        merger = OutputMerger(len(sizes))
        observe = len(sizes) > 1 and bool(parts.metrics)
        if observe:
            parts.metrics.begin()
        results = loop.results
        try:
            with self._logs.capture(results):
                for index, weight in enumerate(weights):
                    self._logs.weight = weight
                    part, batches[index] = batches[index], None
                    output = self._forward(request, part, weight)
                    if request.zero_grad is not None and not self._is_cleared:
                        request.zero_grad()
                        parts.rewind.remember_zeros()
                        self._is_cleared = True
                    self._backward(request, output, weight, merger, announce and index == last_counted)
                    merger.add(output, weight, sizes[index])
                    del part, output  # before the next forward
        finally:
            if observe:
                parts.metrics.end()
        if observe:
            parts.metrics.finish(self._logs.metrics_on_step())
        return merger.merged(self._divisor(share.weights.total) / loop.trainer.accumulate_grad_batches)

    def _divisor(self, weight: float) -> float:
        """What a mean over `weight` tokens or samples is divided by to be a part of the effective batch's mean."""
        if not weight:
            return 1.0
        return self._reference / weight / (self.parts.agreement.world_size if self.parts.averages_ranks else 1)

    def _forward(self, request: StepRequest, part: Any, weight: float) -> ClosureResult:
        return self.parts.loop.forward(request, part, self._divisor(weight))

    def _backward(
        self, request: StepRequest, output: ClosureResult, weight: float, merger: OutputMerger, announce: bool
    ) -> None:
        """Run backward; a micro-batch whose labels are all masked has a loss of 0/0 and no gradient."""
        loss, output.closure_loss = output.closure_loss, None
        if loss is None:
            return
        if not weight:
            if not self.parts.averages_ranks:
                return
            loss = loss.nan_to_num() * 0.0  # sharded backward communicates: no rank may skip one
        if announce and merger.loss is not None:
            loss = loss + merger.loss  # a constant: hooks see the loss of the whole batch
        self.parts.loop.backward(request, loss, announce)

    # --- after an attempt -------------------------------------------------------------------------------------------

    def _all_succeeded(self, error: Exception | None, size: int) -> bool:
        """Hear from all ranks how the attempt went.

        Raises:
            Exception: If one failed for another reason than memory, the same on the rank that failed.
        """
        agreement, sizes = self.parts.agreement, self.parts.sizes
        if agreement.world_size == 1:
            self._failed_size = size
            return error is None
        status = _OK if error is None else _OUT_OF_MEMORY if is_out_of_memory(error) else _FAILED
        if not self.parts.recover and status == _OUT_OF_MEMORY:
            status = _FAILED
        told = agreement.exchange(status, size, sizes.current)
        failed = [rank for rank, (theirs, *_) in enumerate(told) if theirs == _FAILED]
        if error is not None and status == _FAILED:
            raise error
        if failed:
            raise RuntimeError(f"Rank {failed[0]} failed in this step; see its error. This rank stops, too.")
        self._failed_size = int(max((size for theirs, size, _ in told if theirs == _OUT_OF_MEMORY), default=0))
        sizes.current = min(sizes.current, int(min(current for *_, current in told)))
        return not self._failed_size

    def _go_back(self, request: StepRequest, error: Exception | None, point: RewindPoint) -> None:
        """Free what the attempt held, restore the state before it and lower the micro-batch, on every rank alike."""
        parts = self.parts
        if error is not None:
            message = str(error).split("\n")[0]
            release(error)
        else:
            message = "on another rank"
        self._logs.clear()
        parts.loop.settle_after_failure(point.hook_name)
        parts.rewind.clear_gradients()
        parts.rewind.load(point)
        self._need_less(request, message, error, point)

    def _need_less(self, request: StepRequest, message: str, error: Exception | None, point: RewindPoint) -> None:
        """Take the rung again that was given up too early, else lower the micro-batch, else take the next rung.

        Raises:
            torch.OutOfMemoryError: If nothing is left.
        """
        parts, size = self.parts, self._failed_size
        rung = parts.ladder.climb_again()
        smaller = 0 if rung else parts.sizes.shrink(size)
        rung = rung or (None if smaller else parts.ladder.climb())
        if smaller:
            rank_zero_warn(f"Memory ran out with micro-batch {size}: the effective batch is repeated with {smaller}.")
            parts.on_change(smaller, message)
        elif rung:
            failed = "one sample" if size == 1 else f"micro-batch {size}"
            rank_zero_warn(f"Memory ran out with {failed}: the effective batch is repeated, from now on with {rung}.")
            parts.on_change(parts.sizes.current, f"from now on with {rung}")
        else:
            raise torch.OutOfMemoryError(
                f"A micro-batch of one sample does not fit{parts.ladder.summary()} {message}\n"
                f"{parts.explain(request, point)}"
            ) from error

    def _complete(self, request: StepRequest, share: Share, point: RewindPoint, result: ClosureResult) -> ClosureResult:
        parts = self.parts
        if request.is_last:
            self._reduce()
            self._correct_window()
            self._past.clear()
        else:
            host = OrderedDict((k, move_data_to_device(v, torch.device("cpu"))) for k, v in request.arguments.items())
            self._past.append(_Past(host, share, point))
        if self._logs:
            self._logs.commit(parts.loop.results)
        parts.loop.after_backward()
        before = parts.sizes.current
        if parts.sizes.succeed() > before:
            parts.on_change(parts.sizes.current, "no failure for a while")
        if given_up := parts.ladder.succeed():  # after every batch: ranks must count alike
            rank_zero_info(f"MicroBatching: no failure for a while; from now on without {given_up}.")
            parts.on_change(parts.sizes.current, f"from now on without {given_up}")
        return result

    def _reduce(self) -> None:
        reducer, agreement = self.parts.reducer, self.parts.agreement
        if reducer is None:
            return
        present = reducer.present()
        signatures = agreement.exchange(crc32(bytes(present)))
        if any(other != signatures[0] for other in signatures):
            present = agreement.any_of(present)
        reducer.add_up(present)
        broadcast_buffers(self.parts.loop.module)

    def _correct_window(self) -> None:
        if self._window_total == self._reference or not self._window_total:
            return
        factor = self._reference / self._window_total
        grads: list[Tensor] = [p.grad for p in self.parts.loop.module.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
