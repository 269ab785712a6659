"""`EffectiveStep`: one loader batch in micro-batches, as one step that succeeds on all ranks or is repeated.

run(batch) -> attempt -> consensus of ranks -> reduce and commit | roll back, lower the micro-batch or climb the ladder
"""

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

from lightning_memfit.fitting.recovery.consensus import RankConsensus
from lightning_memfit.fitting.recovery.ladder import Ladder
from lightning_memfit.fitting.recovery.oom import is_out_of_memory, release
from lightning_memfit.fitting.recovery.postmortem import explain
from lightning_memfit.fitting.recovery.rollback import Rollback, RollbackPoint
from lightning_memfit.fitting.size.device_memory import allocation_retries
from lightning_memfit.fitting.size.sizes import MicroBatchSize
from lightning_memfit.fitting.step.gradient_reducer import GradientReducer, broadcast_buffers
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.outputs import StepOutputs
from lightning_memfit.fitting.step.split import BatchSplitter, LocalBatch
from lightning_memfit.memory.kind import DeviceKind

_OK, _OUT_OF_MEMORY, _FAILED = 0, 1, 2
_STEPS_BETWEEN_CHECKS = 16
_MANY_RETRIES = 4


@dataclass
class _Past:
    """An earlier loader batch of a window of `accumulate_grad_batches`, its arguments in host memory."""

    arguments: "OrderedDict[str, Any]"
    local_batch: LocalBatch
    start: RollbackPoint


class EffectiveStep:
    """Run loader batches in micro-batches, so that gradients and logged values are those of the effective batch.

    Every loss is divided so that the gradients add up to those of the mean over the effective batch: all
    micro-batches, all ranks, all loader batches of a window of `accumulate_grad_batches`. The weight of a window is
    known only at its end: until then the first batch is assumed for all, and if they differ the gradients are
    corrected by one factor before the step.

    An attempt runs every micro-batch without communication between ranks. Then all ranks exchange how it went, as three
    numbers each. Only if all succeeded are gradients reduced and values logged. Otherwise all of them go back to the
    start of the effective batch, take a smaller micro-batch and repeat it.

    Args:
        loop: Runs forward and backward.
        splitter: Splits and weighs batches.
        sizes: The micro-batch size in use.
        ladder: Makes one sample need less memory.
        consensus: Communication between the ranks.
        reducer: Sums gradients over ranks; None for one rank and for strategies that reduce in backward.
        recover: Whether an attempt that ran out of memory is repeated, if ranks don't communicate in it.
        on_change: Called with the new micro-batch size and the reason.
        advise: Returns the last lines of the error when nothing helps.
    """

    def __init__(
        self,
        loop: MicroBatchLoop,
        splitter: BatchSplitter,
        sizes: MicroBatchSize,
        ladder: Ladder,
        consensus: RankConsensus,
        reducer: GradientReducer | None,
        recover: bool,
        on_change: Callable[[int, str], None],
        advise: Callable[[], str] | None,
    ) -> None:
        self._loop = loop
        self._splitter = splitter
        self._sizes = sizes
        self._ladder = ladder
        self._consensus = consensus
        self._reducer = reducer
        self._is_alone = consensus.world_size == 1
        # Sharded strategies communicate in forward and average gradients in backward: no rank can stop alone.
        self._is_sharded = not self._is_alone and reducer is None
        self._recovers = recover and not self._is_sharded
        self._on_change = on_change
        self._advise = advise
        self._device: torch.device = loop.trainer.strategy.root_device
        self._is_cached = DeviceKind.of(self._device).has_caching_allocator
        self._rollback = Rollback(loop.module, self._device)
        self._outputs = StepOutputs(loop.module, loop.results)
        self._past: list[_Past] = []
        self._window_total = 0.0
        self._reference = 1.0
        self._is_cleared = False
        self._failed_size = 0
        self._num_steps = 0
        self._retries = 0

    def run(self, request: StepRequest) -> ClosureResult:
        """Run one loader batch; gradients are complete when it was the last of its window.

        Raises:
            torch.OutOfMemoryError: If not even one sample fits.
        """
        self._num_steps += 1
        if self._is_cached and not self._num_steps % _STEPS_BETWEEN_CHECKS:
            self._watch_allocator()
        local_batch = self._splitter.read(request.arguments["batch"])
        self._weigh_in(request, local_batch)
        start = self._rollback.save()
        is_repeated = False
        while True:
            size = min(self._sizes.current, local_batch.num_samples)
            result, error = self._attempt(request, local_batch, size, start if is_repeated else None)
            if self._all_succeeded(error, size):
                break
            self._go_back(request, error, start)
            del error
            is_repeated = True
        assert result is not None
        return self._complete(request, local_batch, start, result)

    def _weigh_in(self, request: StepRequest, local_batch: LocalBatch) -> None:
        """Add the weight of this batch, over all ranks, to that of its window."""
        total = local_batch.weight
        if not self._is_alone:
            total = sum(theirs for (theirs,) in self._consensus.exchange(total))
        if request.zero_grad is not None:
            self._past.clear()
            self._is_cleared = False
            self._window_total = 0.0
            self._reference = max(total, 1e-30) * self._loop.trainer.accumulate_grad_batches
        self._window_total += total

    # --- an attempt -------------------------------------------------------------------------------------------------

    def _attempt(
        self, request: StepRequest, local_batch: LocalBatch, size: int, repeat_from: RollbackPoint | None
    ) -> tuple[ClosureResult | None, Exception | None]:
        try:
            if repeat_from is not None and self._past:
                self._repeat_past(request, repeat_from, size)
            return self._run_micro_batches(request, local_batch, size), None
        except Exception as error:
            if self._is_alone and not (self._recovers and is_out_of_memory(error)):
                raise
            return None, error

    def _repeat_past(self, request: StepRequest, start: RollbackPoint, size: int) -> None:
        """Run the earlier loader batches of the window again for their gradients; they have been logged already."""
        for past in self._past:
            self._rollback.load(past.start)
            arguments = OrderedDict((k, move_data_to_device(v, self._device)) for k, v in past.arguments.items())
            again = replace(request, arguments=arguments, zero_grad=None, is_last=False)
            size_of_past = min(size, past.local_batch.num_samples)
            self._run_micro_batches(again, past.local_batch, size_of_past, announce=False)
            self._outputs.clear()
        self._rollback.load(start)

    def _run_micro_batches(
        self, request: StepRequest, local_batch: LocalBatch, size: int, announce: bool = True
    ) -> ClosureResult:
        loop, outputs = self._loop, self._outputs
        batches, sizes, weights = self._splitter.micro_batches(request.arguments["batch"], local_batch, size)
        last_counted = len(weights) - 1
        while last_counted and not weights[last_counted]:
            last_counted -= 1
        outputs.begin(len(sizes))
        try:
            for index, weight in enumerate(weights):
                outputs.logs.weight = weight
                part, batches[index] = batches[index], None
                output = loop.forward(request, part, self._divisor(weight))
                if request.zero_grad is not None and not self._is_cleared:
                    request.zero_grad()
                    self._rollback.remember_zeros()
                    self._is_cleared = True
                self._backward(request, output, weight, announce and index == last_counted)
                outputs.add(output, weight, sizes[index])
                del part, output  # before the next forward
        finally:
            outputs.end()
        return outputs.merged(self._divisor(local_batch.weight) / loop.trainer.accumulate_grad_batches)

    def _divisor(self, weight: float) -> float:
        """Return the divisor that makes a mean over `weight` tokens or samples a part of the effective batch's mean."""
        if not weight:
            return 1.0
        return self._reference / weight / (self._consensus.world_size if self._is_sharded else 1)

    def _backward(self, request: StepRequest, output: ClosureResult, weight: float, announce: bool) -> None:
        """Run backward; a micro-batch whose labels are all masked has a loss of 0/0 and no gradient."""
        loss, output.closure_loss = output.closure_loss, None
        if loss is None:
            return
        if not weight:
            if not self._is_sharded:
                return
            loss = loss.nan_to_num() * 0.0  # sharded backward communicates: no rank may skip one
        if announce and self._outputs.loss is not None:
            loss = loss + self._outputs.loss  # a constant: hooks see the loss of the whole batch
        self._loop.backward(request, loss, announce)

    # --- consensus --------------------------------------------------------------------------------------------------

    def _all_succeeded(self, error: Exception | None, size: int) -> bool:
        """Exchange with all ranks how the attempt went.

        Raises:
            Exception: If a rank failed for a reason other than memory; on that rank the same exception.
        """
        if self._is_alone:
            self._failed_size = size
            return error is None
        status = _OK if error is None else _OUT_OF_MEMORY if is_out_of_memory(error) else _FAILED
        if not self._recovers and status == _OUT_OF_MEMORY:
            status = _FAILED
        told = self._consensus.exchange(status, size, self._sizes.current)
        failed = [rank for rank, (theirs, *_) in enumerate(told) if theirs == _FAILED]
        if error is not None and status == _FAILED:
            raise error
        if failed:
            raise RuntimeError(f"Rank {failed[0]} failed in this step; see its error. This rank stops, too.")
        self._failed_size = int(max((size for theirs, size, _ in told if theirs == _OUT_OF_MEMORY), default=0))
        self._sizes.current = min(self._sizes.current, int(min(current for *_, current in told)))
        return not self._failed_size

    # --- after success ----------------------------------------------------------------------------------------------

    def _complete(
        self, request: StepRequest, local_batch: LocalBatch, start: RollbackPoint, result: ClosureResult
    ) -> ClosureResult:
        if request.is_last:
            if self._reducer is not None:
                self._reduce(self._reducer)
            self._correct_window()
            self._past.clear()
        else:
            host = OrderedDict((k, move_data_to_device(v, torch.device("cpu"))) for k, v in request.arguments.items())
            self._past.append(_Past(host, local_batch, start))
        self._outputs.commit()
        self._loop.after_backward()
        before = self._sizes.current
        if self._sizes.succeed() > before:
            self._on_change(self._sizes.current, "no failure for a while")
        if given_up := self._ladder.succeed():  # after every batch: ranks must count alike
            rank_zero_info(f"MicroBatching: no failure for a while; from now on without {given_up}.")
            self._on_change(self._sizes.current, f"from now on without {given_up}")
        return result

    def _reduce(self, reducer: GradientReducer) -> None:
        present = reducer.present()
        signatures = self._consensus.exchange(crc32(bytes(present)))
        if any(other != signatures[0] for other in signatures):
            present = self._consensus.any_of(present)
        reducer.add_up(present)
        broadcast_buffers(self._loop.module)

    def _correct_window(self) -> None:
        if self._window_total == self._reference or not self._window_total:
            return
        factor = self._reference / self._window_total
        grads: list[Tensor] = [p.grad for p in self._loop.module.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    # --- after a failure --------------------------------------------------------------------------------------------

    def _go_back(self, request: StepRequest, error: Exception | None, start: RollbackPoint) -> None:
        """Free what the attempt held, restore the state before it and lower the micro-batch, on every rank alike."""
        self._outputs.clear()
        if error is not None:
            message = str(error).split("\n")[0]
            release(error)
        else:
            message = "on another rank"
        self._rollback.clear_gradients()
        self._rollback.load(start)
        self._need_less(request, message, error, start)

    def _need_less(self, request: StepRequest, message: str, error: Exception | None, start: RollbackPoint) -> None:
        """Take again a rung that was given up too early, else lower the micro-batch, else take the next rung.

        Raises:
            torch.OutOfMemoryError: If nothing is left.
        """
        size = self._failed_size
        rung = self._ladder.climb_again()
        smaller = 0 if rung else self._sizes.shrink(size)
        rung = rung or (None if smaller else self._ladder.climb())
        if smaller:
            rank_zero_warn(f"Memory ran out with micro-batch {size}: the effective batch is repeated with {smaller}.")
            self._on_change(smaller, message)
        elif rung:
            failed = "one sample" if size == 1 else f"micro-batch {size}"
            rank_zero_warn(f"Memory ran out with {failed}: the effective batch is repeated, from now on with {rung}.")
            self._on_change(self._sizes.current, f"from now on with {rung}")
        else:
            raise torch.OutOfMemoryError(
                f"A micro-batch of one sample does not fit{self._ladder.summary()} {message}\n"
                f"{self._explain(request, start)}"
            ) from error

    def _explain(self, request: StepRequest, start: RollbackPoint) -> str:
        """Run one sample once more and return what fills the memory."""
        count = self._splitter.count(request.batch)
        part = self._splitter.split(request.batch, [1, count - 1] if count > 1 else [1])[0]

        def run() -> None:
            loss = self._loop.forward(request, part, 1.0).closure_loss
            if loss is not None:
                self._loop.backward(request, loss, announce=False)

        text = explain(self._loop.module, self._loop.trainer.optimizers, run, self._advise)
        self._loop.module._current_fx_name = start.hook_name  # Lightning doesn't reset it when a hook raises
        return text

    def _watch_allocator(self) -> None:
        """Lower the size if the caching allocator keeps emptying its cache, which costs far more than one pass."""
        before, self._retries = self._retries, allocation_retries(self._device)
        if self._retries - before >= _MANY_RETRIES and self._sizes.current > 1:
            size = self._sizes.shrink(self._sizes.current)
            rank_zero_info(
                f"MicroBatching: memory is so tight that the allocator is thrashing; micro-batch {size} now."
            )
            self._on_change(size, f"{self._retries - before} allocation retries in {_STEPS_BETWEEN_CHECKS} steps")
