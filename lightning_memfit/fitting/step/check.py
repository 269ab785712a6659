"""`SelfCheck`: whether the parts of a batch give what the batch gives, measured on the user's own step and data.

Samples are run together and in two unequal parts by the code that training runs, from one state and twice in a row:
what the first turn sets and the second one reads shows there. Gradients, the loss, buffers and frozen weights have to
agree. What the loss is a mean over is found by trying candidates: a wrong one can't do harm.
"""

from typing import Any, NoReturn

from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.fitting.recovery.step_state import is_look
from lightning_memfit.fitting.size.device_memory import DeviceMemory
from lightning_memfit.fitting.step.comparison import Comparison, Samples, normalised
from lightning_memfit.fitting.step.loop import StepRequest
from lightning_memfit.fitting.step.loss_weights import IGNORE_INDEX
from lightning_memfit.fitting.step.passes import NotFiniteError, PartFailedError
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.reliability.consensus import PeerFailed, ShortElsewhere
from lightning_memfit.techniques.core.facts import batch_statistics

_DIVISORS = (1.0, 2.0**8, 2.0**16)
"""Of the loss, each tried where gradients of 16 bits overflow with the one before; scalers begin at 65536."""
_LAST_OPEN = 8
"""The last split step that is checked only to tell logged sums and means apart."""
_OK, _OUT_OF_MEMORY, _FAILED, _OVERFLOWED, _UNSEEN = range(5)


class SelfCheck:
    """Compares samples together with samples apart: at split steps 1, 2, 4 ... 64, and at new kinds of cuts.

    Args:
        comparison: Compares some samples, once.
        device_memory: The device's memory; None if it is not limited, so that any batch fits at once.

    Attributes:
        is_done: Whether a check has passed.
    """

    def __init__(self, comparison: Comparison, device_memory: DeviceMemory | None) -> None:
        self._comparison = comparison
        self._memory = device_memory
        self._loop = comparison.loop
        self._splitter = comparison.splitter
        self._weights = comparison.weights
        self._consensus = comparison.consensus
        self._passes = comparison.passes
        self._last_number = 0
        self._cuts: set[frozenset[Any]] = set()
        self._warned: set[str] = set()
        self.is_done = False

    def of_weights(self) -> "SelfCheck":
        """Return a check that learns nothing but what losses are means over."""
        return SelfCheck(self._comparison.of_weights(), self._memory)

    def is_due(self, batch: Any, number: int) -> bool:
        """Whether the split step of a number, counted from 1, is to be checked."""
        if not self.is_done:
            return True
        is_look_due = is_look(number) or (self._comparison.rules.is_open and number <= _LAST_OPEN)
        return (is_look_due and number != self._last_number) or self._splitter.cuts(batch) not in self._cuts

    def run(
        self, request: StepRequest, batch: Any, num_samples: int, size: int, has_failed: bool, number: int = 0
    ) -> None:
        """Compare samples of a batch, as many as fit, and put everything back.

        Args:
            request: The step.
            batch: The loader batch.
            num_samples: Its number of samples.
            size: The micro-batch size about to be used, which is believed to fit.
            has_failed: Whether memory has just run out with more.
            number: Number of the split step.

        A batch whose gradients are not finite shows nothing: the check is not done then.

        Raises:
            MisconfigurationException: If micro-batches would give other weights. Nothing has changed then.
        """
        self._last_number = number
        # Together and in parts: where memory is limited, no more samples than the batch has.
        count = num_samples
        if self._memory is not None or has_failed:
            # A comparison holds more than a step: what it compares, and on ranks that share one batch a copy of it.
            together = (size if self._memory is None else size * 3 // 4) if self._consensus.can_repeat else size // 2
            count = max(2, min(together, num_samples // 2))
        self._passes.divisor, larger = _DIVISORS[0], iter(_DIVISORS[1:])
        while True:
            status, failure = self._attempt(request, batch, num_samples, count, size)
            told: set[float] = {_OUT_OF_MEMORY}
            most, statuses = count, []
            if not isinstance(failure, ShortElsewhere):
                statuses = self._consensus.exchange(status, count)
                told, most = {theirs for theirs, _ in statuses}, int(max(theirs for _, theirs in statuses))
            if _FAILED in told:
                rank = [theirs for theirs, _ in statuses].index(_FAILED)
                said = self._consensus.from_rank(rank, f"{type(failure).__name__}: {failure}")
                if status == _FAILED and failure is not None:
                    self._raise(failure)
                raise PeerFailed(f"Rank {rank} failed before this step: {said}\nThis rank stops, too.")
            if failure is not None:
                release(failure)
            if _OUT_OF_MEMORY in told:
                if most <= 2:  # on all ranks alike, whose batches may have different numbers of samples
                    rank_zero_warn(
                        "MicroBatching: not even two samples fit at once, so that nothing could show whether "
                        "micro-batches give what the whole batch gives. The loss must be a mean over samples or "
                        "unmasked label tokens."
                    )
                    break
                count = max(2, min(count // 2, size))
            elif _OVERFLOWED not in told:
                break
            else:
                self._passes.divisor = next(larger)
        self._agree(batch, num_samples)
        self._warn_of_loggers()
        if self._memory is not None:
            self._memory.reset_peak()
        if _UNSEEN not in told:
            self.is_done = True
            self._cuts.add(self._splitter.cuts(batch))

    def _warn_of_loggers(self) -> None:
        if names := self._passes.logger_names - self._warned:
            self._warned |= names
            rank_zero_warn(
                f"`training_step` writes {', '.join(f'`{name}`' for name in sorted(names))} to the logger itself: once "
                "per micro-batch, with the micro-batch's values. `self.log` writes once, with the whole batch's."
            )

    def _attempt(
        self, request: StepRequest, batch: Any, num_samples: int, count: int, size: int
    ) -> tuple[int, Exception | None]:
        """Compare on all ranks; return how it went on this one, and the error if it failed."""
        if num_samples < 2:
            return _OK, None

        def compare() -> Exception | None:
            try:
                self._compare(Samples(request, batch, num_samples, count, size))
            except (NotFiniteError, ShortElsewhere) as error:
                if self._consensus.stops_together:
                    raise
                return error
            return None

        unseen, failure = self._consensus.together(compare)
        failure = failure or unseen
        if failure is None or isinstance(failure, ShortElsewhere):
            return _OK, failure
        if isinstance(failure, NotFiniteError):
            return _OVERFLOWED if failure.is_narrow and self._passes.divisor < _DIVISORS[-1] else _UNSEEN, failure
        return _OUT_OF_MEMORY if is_out_of_memory(failure) else _FAILED, failure

    def _raise(self, failure: Exception) -> NoReturn:
        is_alone = isinstance(failure, PartFailedError) and isinstance(failure.__cause__, ValueError)
        layers = batch_statistics(self._loop.module) if is_alone else []
        if layers and not self._comparison.holds_statistics:  # which have no statistics of one sample, and say so
            raise MisconfigurationException(normalised(layers)) from failure
        raise failure

    def _agree(self, batch: Any, num_samples: int) -> None:
        """Let all ranks weigh by the same rules: what one has refuted is refuted for all."""
        if self._consensus.world_size == 1 or self._weights.is_users:
            return
        if self._consensus.any_of([self._weights.is_sum])[0]:
            self._weights.take_sum()
            return
        mine = sorted(self._passes.ignored)
        for index in range(int(max(count for (count,) in self._consensus.exchange(len(mine))))):
            told_values = self._consensus.exchange(mine[index] if index < len(mine) else IGNORE_INDEX)
            self._weights.ignore(int(value) for (value,) in told_values)
        rules, refuted = self._weights.all_rules(batch, num_samples), self._weights.refuted
        if len({length for (length,) in self._consensus.exchange(len(rules))}) > 1:
            raise MisconfigurationException(
                "The batches of the ranks are built differently, so that they can't agree by what to weigh "
                "micro-batches. Define `loss_weight(batch)`, the number that the loss of a batch is averaged over."
            )
        if rules:
            told = self._consensus.any_of([rule in refuted for rule in rules])
            self._weights.refute(rule for rule, is_refuted in zip(rules, told, strict=True) if is_refuted)

    # --- a comparison -----------------------------------------------------------------------------------------------

    def _compare(self, samples: Samples) -> None:
        """Compare in the parameters' own precision if the module can be run so.

        Raises:
            MisconfigurationException: If the parts don't give the whole.
            NotFiniteError: If gradients are not finite.
        """
        if isinstance(self._loop.trainer.precision_plugin, MixedPrecision):
            try:
                with self._passes.undone(autocast=False):
                    return self._comparison.run(samples)
            except Exception as error:
                is_judged = isinstance(error, (MisconfigurationException, NotFiniteError, ShortElsewhere))
                if (is_judged and not isinstance(error, PartFailedError)) or is_out_of_memory(error):
                    raise
                release(error)
        with self._passes.undone(autocast=True):
            return self._comparison.run(samples)
