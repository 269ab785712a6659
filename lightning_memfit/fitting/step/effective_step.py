"""`EffectiveStep`: one loader batch in micro-batches, as one step that succeeds on all ranks or is repeated.

run(batch) -> attempt -> consensus of ranks -> reduce and commit | roll back, lower the micro-batch or climb the ladder
"""

import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_memfit.device.host import probe_host
from lightning_memfit.fitting.recovery.ladder import Ladder
from lightning_memfit.fitting.recovery.lockstep import TRAINING
from lightning_memfit.fitting.recovery.postmortem import explain
from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.fitting.recovery.rollback import Rollback, RollbackPoint
from lightning_memfit.fitting.recovery.step_state import (
    MISSING,
    MicroBatchStates,
    Saved,
    Slot,
    StateRules,
    StepState,
    copies_of,
    find_slots,
)
from lightning_memfit.fitting.size.device_memory import allocation_retries
from lightning_memfit.fitting.size.shapes import ProvenShapes, ShapeGuard
from lightning_memfit.fitting.size.sizes import MicroBatchSize
from lightning_memfit.fitting.step.exactness import ExactnessCheck
from lightning_memfit.fitting.step.gradient_hooks import HooksOfBatch
from lightning_memfit.fitting.step.gradient_reducer import GradientReducer
from lightning_memfit.fitting.step.log_rules import LogRules
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.loss_weights import LocalBatch, LossWeights
from lightning_memfit.fitting.step.outputs import StepOutputs, merge_kept
from lightning_memfit.fitting.step.split import BatchGuard, BatchSplitter, KeptBatch, sizes_of
from lightning_memfit.memory.collectives import broadcast_from_first
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.reliability.consensus import At, PeerFailed, RankConsensus, require_as_many_batches

_NO_RULES = StateRules()
_OK, _OUT_OF_MEMORY, _FAILED, _OPEN = 0, 1, 2, 3
_SKIPS = (
    "`training_step` returned None, which skips a batch, for some micro-batches of a batch and not others: the "
    "whole batch would be skipped or not. Return a loss of zero weight for them, keep the whole share in one "
    "micro-batch, or accept it: `MicroBatching(allow_batch_statistics=True)`."
)
_CLOSURES = (
    "The optimizer calls its closure more than once per step, and with `accumulate_grad_batches` the closure runs the "
    "last batch of a window only: no call but the first gives the gradients of the effective batch. Leave "
    "`accumulate_grad_batches` at 1 and let the loader deliver the whole batch; `MicroBatching` cuts it."
)
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
_UNEQUAL = (
    "The ranks' batches make {} micro-batches. ZeRO communicates in every forward or backward, so that all ranks must "
    "run equally many: let the loaders of all ranks deliver equally many samples (`drop_last=True`)."
)
_OTHER_WEIGHTS = (
    "The ranks' modules have {} parameters: gradients of one rank alone can't be averaged. Add and remove layers on "
    "all ranks alike."
)
_OWN_GRADIENTS = (
    "`training_step` runs a backward pass of its own, which leaves gradients on weights, or clears gradients. They are "
    "cleared after the first step of a window of `accumulate_grad_batches`; at later ones this changes what is added "
    "up, and would once per micro-batch. Take `torch.autograd.grad(loss, inputs)` for gradients of inputs, clear none, "
    "or leave `accumulate_grad_batches` at 1."
)
_WRITTEN_WHEN_CLEARED = (
    "`on_before_zero_grad` or `optimizer_zero_grad` changes {} of the module between forward and backward of a batch, "
    "and the batch is split: forward of the next micro-batches would see the new values. Change it in "
    "`on_train_batch_end`, which is called once per batch, or keep the whole share in one micro-batch."
)
_NO_CHECK, _OF_WEIGHTS, _WHOLE_CHECK = 0, 1, 2
_STEPS_BETWEEN_CHECKS = 16
_MANY_RETRIES = 4
_MAX_CHECKS = 3
_MAX_WEIGHINGS = 3
_HOST_SHARE = 0.5  # of free memory: runs that split nothing need none of it otherwise
_LET_OTHERS_SPEAK = 2.0  # seconds
_EQUAL = 1e-9
_ALWAYS_RISKY = 2
"""Steps at first, of which the first one makes the optimizer's states."""


def _num_parts(local_batch: LocalBatch, size: int) -> int:
    return -(-local_batch.num_samples // size)


def _on_host(batch: Any) -> Any:
    return move_data_to_device(batch, torch.device("cpu"))


def _do_nothing() -> None:
    """Run nothing."""


def _are_written(before: list[tuple[Tensor, Tensor | None]], versions: list[int | None]) -> bool:
    """Whether gradients of some weights are others than before, or have been written to."""
    return any(
        parameter.grad is not grad or (grad is not None and grad._version != version)
        for (parameter, grad), version in zip(before, versions, strict=True)
    )


class _Open(Exception):
    """What a check on this batch can settle: new values on the module, or ways to combine values that differ here."""


@dataclass
class _Past:
    """An earlier loader batch of a window of `accumulate_grad_batches`, in host memory as it was before its step."""

    arguments: "OrderedDict[str, Any]"
    kept: KeptBatch
    local_batch: LocalBatch
    start: RollbackPoint


class EffectiveStep:
    """Run loader batches in micro-batches, so that gradients and logged values are those of the effective batch.

    Every loss is divided so that the gradients add up to those of the mean over the effective batch: all
    micro-batches, all ranks, all loader batches of a window of `accumulate_grad_batches`. The weight of a window is
    known only at its end: until then the first batch is assumed for all, and if they differ the gradients are
    corrected by one factor before the step.

    Before a batch is split for the first time, an `ExactnessCheck` compares samples together with samples apart, and
    again on the first batch for which it matters what exactly the loss is a mean over.

    An attempt runs every micro-batch without communication between ranks, or with that of a sharded module, which a
    `Lockstep` ends on all ranks if one fails. Then all ranks exchange how it went, as three numbers each. Only if all
    succeeded are gradients reduced and values logged. Otherwise all of them go back to the start of the effective
    batch, take a smaller micro-batch and repeat it.

    Args:
        loop: Runs forward and backward.
        splitter: Splits batches.
        weights: Weighs micro-batches.
        check: Compares samples together with samples apart; None if the user accepts differences.
        sizes: The micro-batch size in use.
        ladder: Makes one sample need less memory.
        consensus: Communication between the ranks.
        reducer: Sums gradients over ranks; None for one rank and for strategies that reduce in backward.
        recover: Whether an attempt that ran out of memory is repeated, if ranks don't communicate in it.
        on_change: Called with the new micro-batch size and the reason.
        advise: Returns the last lines of the error when nothing helps.
        rules: How logged values of micro-batches make that of the batch.
    """

    def __init__(
        self,
        loop: MicroBatchLoop,
        splitter: BatchSplitter,
        weights: LossWeights,
        check: ExactnessCheck | None,
        sizes: MicroBatchSize,
        ladder: Ladder,
        consensus: RankConsensus,
        reducer: GradientReducer | None,
        recover: bool,
        on_change: Callable[[int, str], None],
        advise: Callable[[], str] | None,
        rules: LogRules,
    ) -> None:
        self._loop = loop
        self._splitter = splitter
        self._weights = weights
        self._check = check
        self._sizes = sizes
        self._ladder = ladder
        self._consensus = consensus
        self._reducer = reducer
        self._share_added: Callable[[], None] | None = getattr(loop.trainer.strategy, "share_added", None)
        self._num_ranks = consensus.world_size
        self._is_alone = self._num_ranks == 1
        # Sharded strategies communicate in forward and average gradients in backward: no rank can stop alone.
        self._engine = loop.engine
        self._is_sharded = self._engine is not None or (not self._is_alone and reducer is None)
        self._stops_alone = self._is_sharded and not consensus.stops_together
        self._recovers = recover and not self._stops_alone
        self._proven = ProvenShapes()
        self._on_change = on_change
        self._advise = advise
        self._device: torch.device = loop.trainer.strategy.root_device
        self._is_cached = DeviceKind.of(self._device).has_caching_allocator
        self._rollback = Rollback(loop.module, self._device)
        self._outputs = StepOutputs(loop.module, loop.results, rules)
        self._rules = rules
        self._guard = BatchGuard()
        self._num_checks = 0
        self._num_weighings = _MAX_WEIGHINGS
        self._is_mean = False
        self._looks = False
        self._written_once: dict[str, Slot] = {}
        self._cleared: Saved = {}
        self._uncleared: Saved = {}
        self._is_open = False
        self._whole = LocalBatch(0, 0.0)
        self._past: list[_Past] = []
        self._window_total = 0.0
        self._batch_total = 0.0
        self._reference = 1.0
        self._is_cleared = False
        self._failed_size = 0
        self._num_steps = 0
        self._retries = allocation_retries(self._device)  # those of before training, such as of trial steps
        self.shapes: ShapeGuard | None = None
        self._last: tuple[LocalBatch, RollbackPoint]
        self._is_again = False
        self._is_risky = False
        self._checked_rank = 0
        self._hides_gradients = False
        self._written_weights: set[str] = set()

    @property
    def _weighs_whole(self) -> bool:
        """Whether batches that aren't split are weighed; alone and not accumulating, their weight cancels out."""
        return not self._is_alone or self._loop.trainer.accumulate_grad_batches > 1  # which callbacks may change

    @property
    def repeats(self) -> bool:
        """Whether an effective batch can be repeated once it is complete."""
        return self._is_alone and self._recovers

    def go_back(self) -> None:
        """Return to the start of the loader batch that was run last; the next `run` repeats it, and logs nothing."""
        self._consensus.forget()  # a hook's own forward
        self._outputs.clear()
        self._rollback.clear_gradients()
        self._load(self._last[1], is_first=not self._past)
        self._is_again = True

    def run(self, request: StepRequest) -> ClosureResult:
        """Run one loader batch; gradients are complete when it was the last of its window.

        Raises:
            torch.OutOfMemoryError: If not even one sample fits.
            MisconfigurationException: If micro-batches can't give what the whole batch gives.
        """
        if self._is_again:
            return self._run_again(request)
        if request.is_complete and request.zero_grad is None:
            raise MisconfigurationException(_CLOSURES)
        self._num_steps += 1
        self._consensus.settle()
        if self._is_cached and not self._num_steps % _STEPS_BETWEEN_CHECKS:
            self._watch_allocator()
        if self._reducer is not None and self._share_added is not None:
            self._share_added()
        batch = request.arguments["batch"]
        num_samples = self._splitter.count(batch)
        size = self._size_for(request, num_samples)
        if self._engine is not None:
            size = int(min(theirs for (theirs,) in self._consensus.exchange(size, at=At.BATCH)))
        local_batch = self._weigh(request, num_samples, size)
        state = self._rollback.state
        state.compares = self._check is not None and num_samples > size and self._check.is_worth_more
        start = self._rollback.save()
        needed = _WHOLE_CHECK if num_samples > size and self._needs_check(local_batch, size) else _NO_CHECK
        needed = needed or (_OF_WEIGHTS if self._has_open_weights(local_batch) else _NO_CHECK)
        if self._is_sharded and self._engine is None:
            is_proven = self._num_steps > _ALWAYS_RISKY and self._proven.covers(batch, size)
            self._is_risky = not (is_proven and self._consensus.knows((TRAINING, _num_parts(local_batch, size))))
        needed = self._weigh_in(request, local_batch, needed, _num_parts(local_batch, size))
        if needed == _WHOLE_CHECK:
            local_batch, start = self._check_on(request, local_batch, start, size)
        elif needed == _OF_WEIGHTS:
            local_batch = self._settle_weights(request, local_batch, start, size)
        is_repeated = needed != _NO_CHECK and self._weigh_past_again()
        if is_repeated:
            self._rollback.clear_gradients()
        request.kept = self._guard.keep(batch)  # there, so that it dies with the batch
        self._num_checks = 0
        self._looks = self._check is not None and (state.is_looking or state.compares)
        state.suspects -= self._known()
        result = self._run_to_success(request, local_batch, start, size, is_repeated)
        self._guard.learn(request.kept)
        if self._rollback.state.is_looking:
            self._rollback.state.look_at_weights()
        self._outputs.commit()
        if self._loop.has_after_backward:
            self._loop.after_backward(partial(self._run_gradients_again, request))
        self._complete(request, *self._last)
        request.is_complete = True
        return result

    def _run_again(self, request: StepRequest) -> ClosureResult:
        self._is_again = False
        result = self._run_gradients_again(request)
        if self._loop.has_after_backward:
            self._loop.after_backward(partial(self._run_gradients_again, request), is_repeated=True)
        return result

    def _run_gradients_again(self, request: StepRequest) -> ClosureResult:
        """Run forward and backward of the batch that was run last from its start; it is logged already."""
        self.go_back()
        self._is_again = False
        request.arguments["batch"] = self._guard.restored(request.kept)
        with self._loop.logged_already():
            size = self._size_for(request, self._last[0].num_samples)
            result = self._run_to_success(request, *self._last, size, is_repeated=True)
        self._outputs.clear()
        return result

    def _run_to_success(
        self,
        request: StepRequest,
        local_batch: LocalBatch,
        start: RollbackPoint,
        size: int,
        is_repeated: bool = False,
    ) -> ClosureResult:
        """Attempt the batch until it succeeds on all ranks, and complete its gradients."""
        num_samples = local_batch.num_samples
        self._last = local_batch, start
        while True:
            result, error = self._attempt(request, local_batch, size, start, is_repeated)
            if self._all_succeeded(error, size):
                break
            is_open = self._go_back(request, error, start)
            del error
            request.arguments["batch"] = self._guard.restored(request.kept)
            is_repeated = True
            size = self._size_for(request, num_samples)
            local_batch = self._weigh(request, num_samples, size)
            needed = _WHOLE_CHECK if self._needs_check(local_batch, size, is_open) else _NO_CHECK
            if self._weigh_again(request, local_batch, needed):
                local_batch, start = self._check_on(request, local_batch, start, size, has_failed=not is_open)
                self._weigh_past_again()
            self._last = local_batch, start
        assert result is not None
        if request.is_last and self._loop.runs_backward:
            if self._reducer is not None:
                self._reduce(self._reducer)
            self._correct_window()
        return result

    def _size_for(self, request: StepRequest, num_samples: int) -> int:
        """Return the micro-batch size for a batch: less than the one in use if its samples are longer than before."""
        size = self._sizes.for_batch(num_samples)
        if self.shapes is None or (self._is_sharded and self._engine is None):
            return size
        return self.shapes.size_for(request.batch, size)

    def _weigh(self, request: StepRequest, num_samples: int, size: int) -> LocalBatch:
        if self._weighs_whole or num_samples > size:
            weighed = self._weights.read(request.batch, num_samples, with_rivals=self._check is not None)
            if weighed.weight or self._weighs_whole:
                return weighed
        # Nothing to weigh by, or nothing to weigh: a batch whose labels are all masked is a step like any other.
        if self._whole.num_samples != num_samples:
            self._whole = LocalBatch(num_samples, float(max(num_samples, 1)))
        return self._whole

    def _needs_check(self, local_batch: LocalBatch, size: int, is_open: bool = False) -> bool:
        """Whether this rank has to check that micro-batches give what the batch gives.

        It has to before the first split of a batch, where it is in dispute how micro-batches weigh, where an attempt
        has left something open, and in some later steps where no comparison has been conclusive.
        """
        if self._check is None or local_batch.num_samples <= size:
            return False
        is_due = self._check.has_doubts and not self._num_steps & (self._num_steps - 1)
        is_known = self._check.is_done and not is_open and not is_due
        return not is_known or local_batch.is_disputed(sizes_of(local_batch.num_samples, size))

    def _known(self) -> set[str]:
        """Return the names of what steps change on the module of which it is known how."""
        rules = _NO_RULES if self._check is None else self._check.state_rules
        return {*rules.names, *self._written_once}

    def _check_on(
        self, request: StepRequest, local_batch: LocalBatch, start: RollbackPoint, size: int, has_failed: bool = False
    ) -> tuple[LocalBatch, RollbackPoint]:
        """Check on this batch, on all ranks; nothing is changed if micro-batches don't give what it gives."""
        assert self._check is not None
        num_samples, batch = local_batch.num_samples, request.batch
        if self._is_sharded:  # gradients are those of all ranks: they compare the same samples, cut alike
            size = int(min(theirs for (theirs,) in self._consensus.exchange(size)))
            batch = move_data_to_device(self._consensus.from_rank(self._checked_rank, _on_host(batch)), self._device)
        self._check.run(request, batch, self._splitter.count(batch), size, has_failed)
        if self._engine is not None:
            self._engine.discard_gradients()
        self._loop.module._current_fx_name = start.hook_name
        if self._check.state_rules.names:
            self._rollback.state.watch(self._check.slots)
            start = replace(start, state=self._rollback.state.copies())
        local_batch = self._weigh(request, num_samples, size)
        self._weigh_again(request, local_batch)
        return local_batch, start

    def _has_open_weights(self, local_batch: LocalBatch) -> bool:
        """Whether it is in dispute how batches weigh that aren't split, beside others of a window or of other ranks.

        Sharded ranks would all have to run the same samples to find out: there the likeliest rule holds.
        """
        if self._check is None or self._is_sharded or not (self._weighs_whole and self._num_weighings):
            return False
        sizes = {past.local_batch.num_samples for past in self._past} | {local_batch.num_samples}
        is_ragged = len(sizes) > 1 and not (self._is_mean or self._check.is_done)  # a sum weighs as it is
        if local_batch.num_samples < 2 or not (is_ragged or local_batch.is_disputed_by_sample):
            return False
        if not self._has_room_to_compare():
            self._num_weighings = 0
        return self._num_weighings > 0

    def _has_room_to_compare(self) -> bool:
        """Whether host memory has room for what a comparison saves: each rank's weights, and their gradients."""
        num_sharing = -(-self._num_ranks // max(1, self._loop.trainer.num_nodes))
        saved_bytes = 2 * sum(parameter.nbytes for parameter in self._loop.module.parameters())
        return num_sharing * saved_bytes <= _HOST_SHARE * probe_host().available_bytes

    def _settle_weights(
        self, request: StepRequest, local_batch: LocalBatch, start: RollbackPoint, size: int
    ) -> LocalBatch:
        """Find out, on all ranks, what losses are means over; where nothing shows it, the likeliest rule stays.

        Nothing is split, so that what else would be refused, be worth a warning, or fail (a part that can't be split
        off, a step that expects its own weights) is none of this run. All ranks hear of it inside the comparison.
        """
        assert self._check is not None
        put_back = self._weights.remember()
        self._num_weighings -= 1
        failure: Exception | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                num_samples = local_batch.num_samples
                self._check.of_weights().run(request, request.batch, num_samples, min(size, num_samples), False)
            self._is_mean = not self._weights.is_sum
        except PeerFailed:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = error
        if failure is not None:
            release(failure)
            put_back()
            self._num_weighings = 0
        self._loop.module._current_fx_name = start.hook_name
        local_batch = self._weigh(request, local_batch.num_samples, local_batch.num_samples)
        self._weigh_again(request, local_batch)
        return local_batch

    def _weigh_in(self, request: StepRequest, local_batch: LocalBatch, needed: int, num_parts: int) -> int:
        """Add the weight of this batch, over all ranks, to that of its window; return the check that any rank needs."""
        if request.zero_grad is not None:
            self._past.clear()
            self._is_cleared = False
            self._window_total = 0.0
        self._batch_total = 0.0
        return self._weigh_again(request, local_batch, needed, num_parts)

    def _weigh_again(self, request: StepRequest, local_batch: LocalBatch, needed: int = 0, num_parts: int = 0) -> int:
        """Replace the weight of this batch in that of its window; return the check that any rank needs.

        Sharded, an attempt is risky for all ranks if it is for one, or if they run different numbers of micro-batches.
        """
        total = local_batch.weight
        if not self._is_alone:
            is_last = self._loop.is_last_of_epoch
            told = self._consensus.exchange(total, needed, -1 if self._is_risky else num_parts, is_last, at=At.BATCH)
            require_as_many_batches([last for *_, last in told], self._loop.num_batches, "limit_train_batches")
            total, needed = sum(theirs for theirs, *_ in told), int(max(theirs for _, theirs, *_ in told))
            if num_parts and self._is_sharded:
                self._is_risky = any(parts != num_parts for _, _, parts, _ in told)
            if self._is_risky and self._engine is not None:
                counts = ", ".join(str(int(parts)) for _, _, parts, _ in told)
                raise MisconfigurationException(_UNEQUAL.format(counts))
            self._checked_rank = next((rank for rank, (_, theirs, *_) in enumerate(told) if theirs), 0)
        if request.zero_grad is not None:
            self._reference = (total or 1.0) * self._loop.trainer.accumulate_grad_batches
        self._window_total += total - self._batch_total
        self._batch_total = total
        return needed

    def _weigh_past_again(self) -> bool:
        """Weigh the earlier batches of the window by the rules that a check on this one has left.

        Returns:
            Whether they have to be run again: their gradients are there, and no one factor makes them those of the new
            weights. On all ranks alike.
        """
        if not self._past or self._weights.is_users:
            return False
        totals: list[float] = []
        factors: list[float] = []
        for past in self._past:
            before, batch = past.local_batch.weight, past.kept.batch
            past.local_batch = self._weights.read(batch, past.local_batch.num_samples)
            now = 1.0 if self._weights.is_sum else past.local_batch.weight
            told = self._consensus.exchange(now, before, at=At.BATCH)
            totals.append(sum(theirs for theirs, _ in told))
            factors += [theirs / old if old else math.inf for theirs, old in told if theirs or old]
        self._reference = (totals[0] or 1.0) * self._loop.trainer.accumulate_grad_batches
        self._window_total = sum(totals) + self._batch_total
        least, most = min(factors, default=1.0), max(factors, default=1.0)
        return not (0.0 < least <= most < math.inf and most - least <= _EQUAL * most)

    # --- an attempt -------------------------------------------------------------------------------------------------

    def _attempt(
        self, request: StepRequest, local_batch: LocalBatch, size: int, start: RollbackPoint, is_repeated: bool
    ) -> tuple[ClosureResult | None, Exception | None]:
        def attempt() -> ClosureResult | _Open:
            if is_repeated and self._past:
                self._repeat_past(request, start, size)
            try:
                result = self._run_micro_batches(request, local_batch, size, start, request.zero_grad is not None)
                if self._reducer is not None:
                    self._reducer.prepare(is_first=request.zero_grad is not None)
                return result
            except _Open as is_open:
                if self._stops_alone:  # and has come to the end
                    return is_open
                raise
            except Exception as error:
                # Others wait in a collective, not to hear how it went: a `RankWatch` tells them.
                if self._stops_alone and is_out_of_memory(error):
                    raise MemoryExhausted(self._say_what_fits(request, size, error)) from error
                raise

        key = None if is_repeated else (TRAINING, _num_parts(local_batch, size))
        found, error = self._consensus.together(attempt, key, is_repeated or self._is_risky)
        result, error = (None, found) if isinstance(found, _Open) else (found, error)
        if error is not None and not isinstance(error, _Open):
            is_expected = self._recovers and is_out_of_memory(error)
            if (self._is_alone and not is_expected) or self._stops_alone:
                raise error
        if error is None and self._is_sharded:
            self._proven.add(request.batch, size)
        return result, error

    def _repeat_past(self, request: StepRequest, start: RollbackPoint, size: int) -> None:
        """Run the earlier loader batches of the window again for their gradients; they have been logged already."""
        for index, past in enumerate(self._past):
            self._load(past.start, is_first=not index)
            batch = move_data_to_device(self._guard.restored(past.kept), self._device)
            arguments = OrderedDict(past.arguments, batch=batch)
            again = replace(request, arguments=arguments, zero_grad=None, is_last=False)
            size_of_past = min(size, past.local_batch.num_samples)
            self._run_micro_batches(again, past.local_batch, size_of_past, past.start, not index, announce=False)
            self._outputs.clear()
        self._rollback.load(start)

    def _run_micro_batches(
        self,
        request: StepRequest,
        local_batch: LocalBatch,
        size: int,
        start: RollbackPoint,
        is_first_of_window: bool,
        announce: bool = True,
    ) -> ClosureResult:
        if local_batch.num_samples <= size:
            return self._run_whole(request, local_batch, start, is_first_of_window, announce)
        loop, outputs = self._loop, self._outputs
        sizes = sizes_of(local_batch.num_samples, size)
        batches = self._splitter.split(request.arguments["batch"], sizes)
        weights = local_batch.weights_of(batches, sizes)
        rules = _NO_RULES if self._check is None else self._check.state_rules
        states = MicroBatchStates(rules, start.state) if rules.names else None
        skips: set[bool] = set()
        # Ranks that can't stop together must all come to the end; what is open is told then. Others look before the
        # last backward, in which hooks of the whole batch run.
        last = len(sizes) - 1
        last_counted = len(weights) - 1
        while last_counted and not weights[last_counted]:
            last_counted -= 1
        if is_first_of_window and self._is_cleared:
            self._hide_cleared()
        hooks = HooksOfBatch(() if self._is_sharded else self._stepped(request))
        outputs.begin(len(sizes))
        try:
            for index, weight in enumerate(weights):
                outputs.logs.begin_part(weight, sizes[index])
                part, batches[index] = batches[index], None
                if states is not None and index:
                    states.before_next()
                output = self._forward(request, part, weight, is_first_of_window, is_first=not index)
                skips.add(output.closure_loss is None)
                if len(skips) > 1 and self._check is not None:
                    raise MisconfigurationException(_SKIPS)
                if request.zero_grad is not None and not self._is_cleared:
                    self._zero_grad(request.zero_grad, start)
                    self._hide_cleared()
                if is_first_of_window and index == last:
                    StepState.load(self._cleared)
                if self._looks and index == last and not self._stops_alone:
                    self._stop_if_written()
                is_final = request.is_last and index == last
                hooks.begin()
                with hooks.aside():
                    self._backward(request, output, weight, announce and index == last_counted, is_final, is_part=True)
                outputs.add(output, weight, sizes[index])
                if states is not None:
                    states.add(sizes[index], weight)
                if self._looks and index == (last if self._stops_alone else 0):
                    self._stop_if_written()
                del part, output  # before the next forward
            hooks.finish(self._divisor(local_batch.weight) / loop.trainer.accumulate_grad_batches)
        finally:
            hooks.give_up()
            outputs.end()
        if states is not None and (disputed := states.finish(merge_kept)):
            assert self._check is not None
            self._check.refute(disputed)
            raise _Open
        result = outputs.merged(self._divisor(local_batch.weight) / loop.trainer.accumulate_grad_batches)
        self._stop_if(bool(self._rules.unsettled) and self._check is not None and self._check.is_worth_more)
        return result

    def _run_whole(
        self,
        request: StepRequest,
        local_batch: LocalBatch,
        start: RollbackPoint,
        is_first_of_window: bool,
        announce: bool,
    ) -> ClosureResult:
        """Run a batch that fits at once: nothing is merged, and most steps of most runs are such."""
        num_samples = local_batch.num_samples
        (batch,) = self._splitter.split(request.arguments["batch"], [num_samples])
        weight = local_batch.weight
        if self._weighs_whole:
            (weight,) = local_batch.weights_of([batch], [num_samples])
        divisor = self._divisor(weight)
        is_cleared = is_first_of_window and self._is_cleared
        if is_cleared:
            self._hide_cleared()
        factor = self._divisor(local_batch.weight) / self._loop.trainer.accumulate_grad_batches
        hooks = HooksOfBatch(() if self._is_sharded or factor == 1.0 else self._stepped(request))
        outputs = self._outputs
        outputs.begin(1)
        try:
            outputs.logs.begin_part(weight, num_samples)
            with self._hidden_gradients(request) if is_cleared and not self._is_sharded else nullcontext():
                result = self._loop.forward(request, batch, divisor)
            if request.zero_grad is not None and not self._is_cleared:
                self._zero_grad(request.zero_grad, start)
            elif is_first_of_window:
                StepState.load(self._cleared)
            hooks.begin()
            with hooks.aside():
                self._backward(request, result, weight, announce, request.is_last)
            hooks.finish(factor)
        finally:
            hooks.give_up()
            outputs.end()
        if factor != 1.0 and result.loss is not None:
            result.loss = result.loss * factor
        return result

    @staticmethod
    def _stepped(request: StepRequest) -> Iterator[Tensor]:
        return (weight for group in request.optimizer.param_groups for weight in group["params"])

    @contextmanager
    def _hidden_gradients(self, request: StepRequest) -> Iterator[None]:
        """Run forward without the gradients so far, and drop those that it leaves."""
        before = [(weight, weight.grad) for weight in self._stepped(request)]
        try:
            for parameter, _ in before:
                parameter.grad = None
            yield
        finally:
            for parameter, grad in before:
                parameter.grad = grad

    def _forward(
        self, request: StepRequest, part: Any, weight: float, is_first_of_window: bool, is_first: bool
    ) -> ClosureResult:
        """Run forward of one micro-batch of several, of which the gradients so far are none of its business.

        A step may run a backward pass of its own, to move its inputs against the loss, say. What that adds to gradients
        of weights is cleared, in a run without micro-batches, before the backward pass of the batch.

        Raises:
            MisconfigurationException: If a step changes gradients that earlier batches of a window have left.
        """
        divisor = self._divisor(weight)
        if self._is_sharded:  # whose backward passes communicate
            return self._loop.forward(request, part, divisor)
        is_cleared_next = is_first and not self._is_cleared
        if is_first_of_window and self._hides_gradients and not is_cleared_next:
            with self._hidden_gradients(request):
                return self._loop.forward(request, part, divisor)
        before = [(weight, weight.grad) for weight in self._stepped(request)]
        versions = [None if grad is None else grad._version for _, grad in before]
        output = self._loop.forward(request, part, divisor)
        if _are_written(before, versions):
            if not is_first_of_window:
                raise MisconfigurationException(_OWN_GRADIENTS)
            self._hides_gradients = True
            if not is_cleared_next:
                raise _Open
        return output

    def _zero_grad(self, zero_grad: Callable[[], None], start: RollbackPoint) -> None:
        """Clear the gradients, once for all micro-batches: what hooks write to the module then is no part of a step.

        In a run without micro-batches they write it between forward and backward of the whole batch.
        """
        state = self._rollback.state
        looks = (self._looks or state.is_looking) and self._loop.has_zero_grad_hooks
        before = state.written() if looks else set()
        weights = state.written_weights() if looks else set()
        self._uncleared = copies_of(self._written_once.values()) if self._written_once else {}
        zero_grad()
        if looks:
            self._written_weights = state.written_weights() - weights
            slots = find_slots(self._loop.module)
            for name in state.written() - before - self._written_once.keys():
                slot = self._written_once[name] = slots[name]
                self._uncleared[name] = start.state.get(name, (slot.saved(), MISSING, None))
        self._cleared = copies_of(self._written_once.values()) if self._written_once else {}
        self._rollback.remember_zeros(may_hold=self._loop.has_zero_grad_hooks)
        self._is_cleared = True

    def _hide_cleared(self) -> None:
        """Let forward find what hooks of `zero_grad` have written since as it was before.

        Raises:
            MisconfigurationException: If they have written to weights in training, or to more than there are copies of.
        """
        lost = {
            name
            for name, (_, old, _) in self._uncleared.items()
            if old is MISSING and isinstance(self._cleared[name][1], torch.nn.Parameter)
        }
        if names := self._written_weights | lost:
            raise MisconfigurationException(_WRITTEN_WHEN_CLEARED.format(", ".join(f"`{n}`" for n in sorted(names))))
        StepState.load(self._uncleared)

    def _load(self, start: RollbackPoint, is_first: bool) -> None:
        """Go back to the start of a loader batch; gradients of a window are cleared once, at its first one."""
        self._rollback.load(start)
        if is_first and self._is_cleared:
            StepState.load(self._cleared)

    def _stop_if_written(self) -> None:
        """End the attempt if micro-batches have changed something on the module that no check has seen."""
        assert self._check is not None
        state = self._rollback.state
        names = state.written() - self._known()
        if state.is_looking:
            names |= state.written_weights() - self._written_weights - self._known()
        self._check.look_for(names)
        self._stop_if(bool(names))

    def _stop_if(self, is_open: bool) -> None:
        """End the attempt if something has come up that a check on this batch can settle, unless several could not."""
        if is_open and self._num_checks < _MAX_CHECKS:
            self._num_checks += 1
            raise _Open

    def _divisor(self, weight: float) -> float:
        """Return the divisor that makes a mean over `weight` tokens or samples a part of the effective batch's mean."""
        if self._weights.is_sum:
            return float(self._loop.trainer.accumulate_grad_batches * (1 if self._is_sharded else self._num_ranks))
        if not weight:
            return 1.0
        return self._reference / weight / (self._consensus.world_size if self._is_sharded else 1)

    def _backward(
        self,
        request: StepRequest,
        output: ClosureResult,
        weight: float,
        announce: bool,
        is_final: bool,
        is_part: bool = False,
    ) -> None:
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
        backward = self._loop.backward_of_part if is_part else self._loop.backward
        backward(request, loss, announce, is_final)

    # --- consensus --------------------------------------------------------------------------------------------------

    def _all_succeeded(self, error: Exception | None, size: int) -> bool:
        """Exchange with all ranks how the attempt went.

        Raises:
            Exception: If a rank failed for a reason other than memory; on that rank the same exception.
        """
        if self._is_alone:
            self._is_open = isinstance(error, _Open)
            self._failed_size = 0 if self._is_open else size
            return error is None
        status = _OK if error is None else _OUT_OF_MEMORY if is_out_of_memory(error) else _FAILED
        status = _OPEN if isinstance(error, _Open) else status
        if not self._recovers and status == _OUT_OF_MEMORY:
            status = _FAILED
        told = self._consensus.exchange(status, size, self._sizes.current, at=At.ATTEMPTED)
        failed = [rank for rank, (theirs, *_) in enumerate(told) if theirs == _FAILED]
        if failed:
            said = self._consensus.from_rank(failed[0], f"{type(error).__name__}: {error}")
            if error is not None and status == _FAILED:
                raise error
            time.sleep(_LET_OTHERS_SPEAK)  # who is first to stop is often the only one that is heard
            raise PeerFailed(f"Rank {failed[0]} failed in this step: {said}\nThis rank stops, too.")
        self._failed_size = int(max((size for theirs, size, _ in told if theirs == _OUT_OF_MEMORY), default=0))
        self._sizes.current = min(self._sizes.current, int(min(current for *_, current in told)))
        self._is_open = any(theirs == _OPEN for theirs, *_ in told)
        return not (self._failed_size or self._is_open)

    # --- after success ----------------------------------------------------------------------------------------------

    def _complete(self, request: StepRequest, local_batch: LocalBatch, start: RollbackPoint) -> None:
        if not request.is_last and self._loop.runs_backward:  # else there are no gradients to make again
            kept = self._guard.put_aside(request.kept)
            arguments = OrderedDict(request.arguments, batch=None)
            self._past.append(_Past(arguments, kept, local_batch, start))
        before = self._sizes.current
        if self._sizes.succeed() > before:
            self._on_change(self._sizes.current, "no failure for a while")
        if given_up := self._ladder.succeed():  # after every batch: ranks must count alike
            self._consensus.start_anew()
            rank_zero_info(f"MicroBatching: no failure for a while; from now on without {given_up}.")
            self._on_change(self._sizes.current, f"from now on without {given_up}")

    def _reduce(self, reducer: GradientReducer) -> None:
        present = reducer.present()
        signatures = self._consensus.exchange(crc32(bytes(present)), len(present), at=At.REDUCTION)
        if len(counts := {int(count) for _, count in signatures}) > 1:
            raise MisconfigurationException(_OTHER_WEIGHTS.format(" and ".join(map(str, sorted(counts)))))
        if any(other != signatures[0] for other in signatures):
            present = self._consensus.any_of(present)
        reducer.add_up(present)
        broadcast_from_first(self._loop.module.buffers())  # as DDP does before a forward that synchronises

    def _correct_window(self) -> None:
        if self._window_total == self._reference or not self._window_total or self._weights.is_sum:
            return
        factor = self._reference / self._window_total
        grads: list[Tensor] = [p.grad for p in self._loop.module.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    # --- after a failure --------------------------------------------------------------------------------------------

    def _go_back(self, request: StepRequest, error: Exception | None, start: RollbackPoint) -> bool:
        """Free what the attempt held, restore the state before it and lower the micro-batch, on every rank alike.

        Returns:
            Whether the attempt ended because something has to be checked, not for memory.
        """
        self._outputs.clear()
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
        self._load(start, is_first=request.zero_grad is not None)
        if not self._failed_size:
            return True
        self._need_less(request, message, error, start)
        self._retries = allocation_retries(self._device)  # the size has been lowered for these
        return False

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
            raise MemoryExhausted(
                f"A micro-batch of one sample does not fit{self._ladder.summary()} {message}\n"
                f"{self._explain(request, start)}"
            ) from error

    def _say_what_fits(self, request: StepRequest, size: int, error: Exception) -> str:
        """Say why a batch can't be repeated, and with which size `fit` can go on from the last checkpoint."""
        why = _NOT_REPEATED if self._engine is not None else _NOT_TOGETHER
        smaller = self._sizes.shrink(size)
        if smaller and self.shapes is not None:
            smaller = self.shapes.size_for(request.batch, smaller)
        fix = _RESUME.format(smaller, size) if smaller else _NOTHING_SMALLER
        return f"{why} {fix} {str(error).splitlines()[0]}"

    def _explain(self, request: StepRequest, start: RollbackPoint) -> str:
        """Run one sample once more and return what fills the memory."""
        count = self._splitter.count(request.batch)
        part = self._splitter.split(request.batch, [1, count - 1] if count > 1 else [1])[0]

        def run() -> None:
            loss = self._loop.forward(request, part, 1.0).closure_loss
            if loss is not None:
                self._loop.backward(request, loss, announce=False)

        if self._is_sharded:
            run = _do_nothing  # in which ranks would have to communicate
        text = explain(self._loop.module, self._loop.trainer.optimizers, run, self._advise)
        self._loop.module._current_fx_name = start.hook_name  # Lightning doesn't reset it when a hook raises
        return text

    def _watch_allocator(self) -> None:
        """Lower the size if a caching allocator keeps emptying its cache, which costs far more than one pass.

        All ranks lower it together, whichever of them is short: those that compute a batch together run equal parts.
        """
        before, self._retries = self._retries, allocation_retries(self._device)
        retries, current = self._retries - before, self._sizes.current
        if not self._is_alone:
            told = self._consensus.exchange(retries, current, at=At.BATCH)
            retries = int(max(theirs for theirs, _ in told))
            current = int(min(theirs for _, theirs in told))
        if retries < _MANY_RETRIES or current <= 1:
            return
        size = self._sizes.shrink(current)
        if not self._is_alone:
            size = self._sizes.current = int(min(theirs for (theirs,) in self._consensus.exchange(size, at=At.BATCH)))
        rank_zero_info(f"MicroBatching: memory is so tight that the allocator is thrashing; micro-batch {size} now.")
        self._on_change(size, f"{retries} allocation retries in {_STEPS_BETWEEN_CHECKS} steps")
