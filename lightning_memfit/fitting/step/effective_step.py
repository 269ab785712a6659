"""`EffectiveStep`: one loader batch in micro-batches, as one step that succeeds on all ranks or is repeated.

run(batch) -> attempt -> consensus of ranks -> reduce and commit | roll back, lower the micro-batch or recompute
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memfit.fitting.recovery.retry import Outcome, outcome_of, tell
from lightning_memfit.fitting.recovery.rollback import Rollback, RollbackPoint
from lightning_memfit.fitting.recovery.step_state import held
from lightning_memfit.fitting.step.accumulation import Accumulation
from lightning_memfit.fitting.step.check import SelfCheck
from lightning_memfit.fitting.step.loop import Fitting, StepRequest
from lightning_memfit.fitting.step.loss_weights import LocalBatch
from lightning_memfit.fitting.step.outputs import StepOutputs
from lightning_memfit.fitting.step.split import BatchGuard, sizes_of
from lightning_memfit.fitting.step.window import PastBatch, Window
from lightning_memfit.memory.collectives import broadcast_from_first
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.reliability.consensus import TRAINING, At

if TYPE_CHECKING:
    from lightning_memfit.fitting.recovery.shortage import Shortage
    from lightning_memfit.fitting.step.gradient_reducer import GradientReducer

_CLOSURES = (
    "The optimizer calls its closure more than once per step, and with `accumulate_grad_batches` the closure runs the "
    "last batch of a window only: no call but the first gives the gradients of the effective batch. Leave "
    "`accumulate_grad_batches` at 1 and let the loader deliver the whole batch; `MicroBatching` cuts it."
)
_OTHER_WEIGHTS = (
    "The ranks' modules have {} parameters: gradients of one rank alone can't be averaged. Add and remove layers on "
    "all ranks alike."
)
_LAST_CHOICE = 64
"""The last split step at which batches are weighed by all candidates, to see whether it matters which is right."""
_ALWAYS_RISKY = 2
"""Steps at first, of which the first one makes the optimizer's states."""


def _shape_of(batch: Any) -> Any:
    from lightning_memfit.fitting.size.shapes import shape_of  # sharded weights alone need it here

    return shape_of(batch)


class EffectiveStep:
    """Run loader batches in micro-batches, so that gradients and logged values are those of the effective batch.

    Before a batch is split for the first time, and at some later ones, a `SelfCheck` compares samples together with
    samples apart; `Window` weighs the batches of one optimizer step. Until then whole batches weigh by the likeliest
    rule: unmasked `labels` where there are some, else samples.

    An attempt runs every micro-batch without communication between ranks, or with that of a sharded module, which a
    `Lockstep` ends on all ranks if one fails. Then all ranks exchange how it went, as three numbers each. Only if all
    succeeded are gradients reduced and values logged. Otherwise all of them go back to the start of the effective
    batch, take a smaller micro-batch and repeat it.
    """

    def __init__(self, fitting: Fitting, reducer: "GradientReducer | None") -> None:
        self._fitting, self._reducer = fitting, reducer
        self._loop = loop = fitting.loop
        self._splitter, self._weights = fitting.splitter, fitting.weights
        self._sizes, self._consensus = fitting.sizes, fitting.consensus
        # Sharded strategies communicate in forward and average gradients in backward: no rank can stop alone.
        self._engine, self._is_sharded = loop.engine, loop.is_sharded
        self._accumulation = Accumulation(loop, self._is_sharded)
        self._check = SelfCheck(fitting, self._accumulation)
        self._shortage: Shortage | None = None  # until memory runs out
        self._share_added: Callable[[], None] | None = getattr(loop.trainer.strategy, "share_added", None)
        self._is_alone = self._consensus.world_size == 1
        self._stops_alone = self._is_sharded and not self._consensus.stops_together
        self._recovers = fitting.options.recover and not self._stops_alone
        self._device: torch.device = loop.trainer.strategy.root_device
        self._rollback = Rollback(loop.module, self._device)
        self._outputs = StepOutputs(loop.module, loop.results)
        self._guard = BatchGuard()
        self._window = Window(fitting)
        self._whole = LocalBatch(0, 0.0)
        self._key: Any = None  # of this batch as it communicates in micro-batches
        self._is_cleared = False
        self._failed_size = 0
        self._num_steps = self._num_split = 0

    def close(self) -> None:
        """Recompute nothing any more."""
        if self._shortage is not None:
            self._shortage.recomputation.close()

    @property
    def can_fail(self) -> bool:
        """Whether a batch in which memory runs out is repeated."""
        return self._recovers

    @property
    def _weighs_whole(self) -> bool:
        """Whether batches that aren't split are weighed; alone and not accumulating, their weight cancels out."""
        return not self._is_alone or self._loop.trainer.accumulate_grad_batches > 1  # which callbacks may change

    def run(self, request: StepRequest) -> ClosureResult:
        """Run one loader batch; gradients are complete when it was the last of its window.

        Raises:
            torch.OutOfMemoryError: If not even one sample fits.
            MisconfigurationException: If micro-batches can't give what the whole batch gives.
        """
        if request.is_complete and request.zero_grad is None:
            raise MisconfigurationException(_CLOSURES)
        self._num_steps += 1
        self._consensus.settle()
        if self._reducer is not None and self._share_added is not None:
            self._share_added()
        batch = request.arguments["batch"]
        num_samples = self._splitter.count(batch)
        size = self._size_for(request, num_samples)
        if self._engine is not None:
            size = int(min(theirs for (theirs,) in self._consensus.exchange(size, at=At.BATCH)))
        self._num_split += num_samples > size
        local_batch = self._weigh(request, num_samples, size)
        start = self._rollback.save()
        if request.zero_grad is not None:
            self._is_cleared = False
        num_parts = -(-num_samples // size)
        if self._is_sharded and self._engine is None:
            self._key = (TRAINING, num_parts, size, _shape_of(batch))
            self._window.is_risky = self._num_steps <= _ALWAYS_RISKY or not self._consensus.knows(self._key)
        needed = self._needed(request, local_batch, size)
        needed = self._window.begin(request, local_batch, needed, num_parts)
        if needed:
            local_batch = self._check_on(request, local_batch, start, size)
        is_repeated = needed and self._window.weigh_past_again()
        if is_repeated:
            self._rollback.clear_gradients()
        request.kept = self._guard.keep(batch)  # there, so that it dies with the batch
        result, local_batch = self._run_to_success(request, local_batch, start, size, is_repeated)
        self._guard.learn(request.kept)
        self._rollback.look_at_weights()
        self._outputs.commit()
        if self._loop.has_after_backward:
            self._loop.after_backward()
        self._complete(request, local_batch, start)
        request.is_complete = True
        return result

    def _run_to_success(
        self, request: StepRequest, local_batch: LocalBatch, start: RollbackPoint, size: int, is_repeated: bool
    ) -> tuple[ClosureResult, LocalBatch]:
        """Attempt the batch until it succeeds on all ranks, and complete its gradients."""
        num_samples = local_batch.num_samples
        while True:
            result, error = self._attempt(request, local_batch, size, start, is_repeated)
            if self._all_succeeded(error, size):
                break
            was_split = num_samples > size
            self._go_back(request, error, start)
            del error
            request.arguments["batch"] = self._guard.restored(request.kept)
            is_repeated = True
            size = self._size_for(request, num_samples)
            self._num_split += num_samples > size and not was_split
            local_batch = self._weigh(request, num_samples, size)
            needed = self._needed(request, local_batch, size)
            if self._window.weigh(request, local_batch, needed):
                local_batch = self._check_on(request, local_batch, start, size, has_failed=True)
                self._window.weigh_past_again()
        assert result is not None
        if request.is_last and self._loop.runs_backward:
            if self._reducer is not None:
                self._reduce(self._reducer)
            self._window.correct()
        return result, local_batch

    def _size_for(self, request: StepRequest, num_samples: int) -> int:
        """Return the micro-batch size for a batch: less than the one in use if its samples are longer than before."""
        size = self._sizes.for_batch(num_samples)
        shapes = self._fitting.shapes
        if shapes is None or (self._is_sharded and self._engine is None):
            return size
        return shapes.size_for(request.batch, size)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _weigh(self, request: StepRequest, num_samples: int, size: int) -> LocalBatch:
        if self._weighs_whole or num_samples > size:
            chooses = num_samples > size and (self._num_split <= _LAST_CHOICE or not self._check.is_done)
            weighed = self._weights.read(request.batch, num_samples, with_rivals=chooses)
            if weighed.weight or self._weighs_whole:
                return weighed
        # Nothing to weigh by, or nothing to weigh: a batch whose labels are all masked is a step like any other.
        if self._whole.num_samples != num_samples:
            self._whole = LocalBatch(num_samples, float(max(num_samples, 1)))
        return self._whole

    def _needed(self, request: StepRequest, local_batch: LocalBatch, size: int) -> bool:
        """Whether this rank needs a check."""
        num_samples = local_batch.num_samples
        if num_samples <= size:
            return False
        is_due = self._check.is_due(request.batch, self._num_split)
        return is_due or local_batch.is_disputed(sizes_of(num_samples, size))

    def _check_on(
        self, request: StepRequest, local_batch: LocalBatch, start: RollbackPoint, size: int, has_failed: bool = False
    ) -> LocalBatch:
        """Check on this batch, on all ranks; nothing is changed if micro-batches don't give what it gives."""
        num_samples, batch = local_batch.num_samples, request.batch
        if request.zero_grad is not None and not self._loop.has_zero_grad_hooks:
            for parameter in self._loop.module.parameters():
                parameter.grad = None  # that of the step before, which is about to be cleared
        if self._is_sharded:  # gradients are those of all ranks: they compare the same samples, cut alike
            size = int(min(theirs for (theirs,) in self._consensus.exchange(size)))
            on_host = move_data_to_device(batch, torch.device("cpu"))
            batch = move_data_to_device(self._consensus.from_rank(self._window.checked_rank, on_host), self._device)
        self._check.run(request, batch, self._splitter.count(batch), size, has_failed, self._num_split)
        if self._engine is not None:
            self._engine.discard_gradients()
        written = self._accumulation.written
        self._rollback.watched.update(written)
        start.state |= held(place for name, place in written.items() if name not in start.state)
        local_batch = self._weigh(request, num_samples, size)
        self._window.weigh(request, local_batch)
        return local_batch

    # --- an attempt -------------------------------------------------------------------------------------------------

    def _attempt(
        self, request: StepRequest, local_batch: LocalBatch, size: int, start: RollbackPoint, is_repeated: bool
    ) -> tuple[ClosureResult | None, Exception | None]:
        def attempt() -> ClosureResult:
            if is_repeated and self._window.past:
                self._repeat_past(request, start, size)
            try:
                result = self._run_parts(request, local_batch, size, start, request.zero_grad is not None)
                if self._reducer is not None:
                    self._reducer.prepare(request.zero_grad is not None, request.is_last)
                return result
            except Exception as error:
                # Others wait in a collective, not to hear how it went: a `RankWatch` tells them.
                if self._stops_alone and is_out_of_memory(error):
                    raise self._find_shortage().ending(request, size, error) from error
                raise

        key = None if is_repeated else self._key
        result, error = self._consensus.together(attempt, key, is_repeated or self._window.is_risky)
        if error is not None:
            is_expected = self._recovers and is_out_of_memory(error)
            if (self._is_alone and not is_expected) or self._stops_alone:
                raise error
        return result, error

    def _repeat_past(self, request: StepRequest, start: RollbackPoint, size: int) -> None:
        """Run the earlier loader batches of the window again for their gradients; they have been logged already."""
        for index, past in enumerate(self._window.past):
            past.start.load()
            batch = move_data_to_device(self._guard.restored(past.kept), self._device)
            arguments = OrderedDict(past.arguments, batch=batch)
            again = replace(request, arguments=arguments, zero_grad=None, is_last=False)
            size_of_past = min(size, past.local_batch.num_samples)
            self._run_parts(again, past.local_batch, size_of_past, past.start, not index, announce=False)
            self._outputs.clear()
        start.load()

    def _run_parts(
        self,
        request: StepRequest,
        local_batch: LocalBatch,
        size: int,
        start: RollbackPoint,
        is_first_of_window: bool,
        announce: bool = True,
    ) -> ClosureResult:
        """Run a batch in micro-batches, or whole if it is no larger than one."""
        sizes = sizes_of(local_batch.num_samples, size)
        parts = self._splitter.split(request.arguments["batch"], sizes)
        weights = [local_batch.weight]
        if len(sizes) > 1 or self._weighs_whole:
            weights = local_batch.weights_of(parts, sizes)
        result = self._accumulation.run(
            request,
            parts,
            sizes,
            weights,
            [self._window.divisor(weight) for weight in weights],
            self._outputs,
            start.state,
            partial(self._zero_grad, request) if request.zero_grad is not None and not self._is_cleared else None,
            is_first_of_window,
            announce,
            request.is_last,
        )
        factor = self._window.factor(local_batch)
        if len(sizes) > 1:
            return self._outputs.merged(factor)
        if factor != 1.0 and result.loss is not None:
            result.loss = result.loss * factor
        return result

    def _zero_grad(self, request: StepRequest) -> None:
        """Clear the gradients of the window before."""
        assert request.zero_grad is not None
        request.zero_grad()
        self._rollback.remember_zeros(may_hold=self._loop.has_zero_grad_hooks)
        self._is_cleared = True

    # --- consensus --------------------------------------------------------------------------------------------------

    def _all_succeeded(self, error: Exception | None, size: int) -> bool:
        """Exchange with all ranks how the attempt went.

        Raises:
            Exception: If a rank failed for a reason other than memory; on that rank the same exception.
        """
        if self._is_alone:
            self._failed_size = size
            return error is None
        outcome = outcome_of(error)
        if not self._recovers and outcome == Outcome.OUT_OF_MEMORY:
            outcome = Outcome.FAILED
        told = tell(self._consensus, outcome, error, "in this step", size, self._sizes.current, at=At.ATTEMPTED)
        self._failed_size = int(max((size for theirs, size, _ in told if theirs == Outcome.OUT_OF_MEMORY), default=0))
        self._sizes.current = min(self._sizes.current, int(min(current for *_, current in told)))
        return not self._failed_size

    # --- after success ----------------------------------------------------------------------------------------------

    def _complete(self, request: StepRequest, local_batch: LocalBatch, start: RollbackPoint) -> None:
        if not request.is_last and self._loop.runs_backward:  # else there are no gradients to make again
            kept = self._guard.put_aside(request.kept)
            arguments = OrderedDict(request.arguments, batch=None)
            self._window.past.append(PastBatch(arguments, kept, local_batch, start))

    def _reduce(self, reducer: "GradientReducer") -> None:
        present = reducer.present()
        signatures = self._consensus.exchange(crc32(bytes(present)), len(present), at=At.REDUCTION)
        if len(counts := {int(count) for _, count in signatures}) > 1:
            raise MisconfigurationException(_OTHER_WEIGHTS.format(" and ".join(map(str, sorted(counts)))))
        if any(other != signatures[0] for other in signatures):
            present = self._consensus.any_of(present)
        reducer.add_up(present)
        broadcast_from_first(self._loop.module.buffers())  # as DDP does before a forward that synchronises

    # --- after a failure --------------------------------------------------------------------------------------------

    def _go_back(self, request: StepRequest, error: Exception | None, start: RollbackPoint) -> None:
        """Free what the attempt held, restore the state before it and lower the micro-batch, on every rank alike."""
        self._outputs.clear()
        if self._reducer is not None:
            self._reducer.free()
        self._consensus.start_anew()
        if error is not None:
            message = str(error).split("\n")[0]
            release(error)
        else:
            message = "on another rank"
        if self._is_cleared or not self._loop.has_zero_grad_hooks:  # else the user's own decides what is cleared
            self._rollback.clear_gradients()
        if self._engine is not None:
            self._engine.discard_gradients()
        start.load()
        self._find_shortage().need_less(request, self._failed_size, message, error)

    def _find_shortage(self) -> "Shortage":
        if self._shortage is None:
            from lightning_memfit.fitting.recovery.shortage import Shortage  # few runs are ever short of memory

            self._shortage = Shortage(self._fitting)
        return self._shortage
