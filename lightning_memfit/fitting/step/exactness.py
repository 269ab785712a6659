"""`ExactnessCheck`: whether the parts of a batch give what the batch gives, tried on the user's own module and data.

Some samples are run together and in two parts, in training mode and with the same random numbers. What micro-batches
need is then compared: the gradient of the samples together is a weighted sum of those of the parts, and what the step
writes on the module can be put together from what the parts write. No list of layers or losses says so: batch
statistics, contrastive and summed losses, class weights, masks, teachers and counters all show in one of the two.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memfit.fitting.recovery.step_state import (
    Slot,
    StateRules,
    added_alike,
    alike,
    is_small,
    reading_of,
)
from lightning_memfit.fitting.size.device_memory import DeviceMemory
from lightning_memfit.fitting.step.comparison import Comparison, Cut, PartFailed, Pass
from lightning_memfit.fitting.step.log_rules import LogRules, check_metrics
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.loss_weights import IGNORE_INDEX, SUM, LossWeights, Rule
from lightning_memfit.fitting.step.outputs import merge, merge_kept
from lightning_memfit.fitting.step.split import BatchSplitter
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.reliability.consensus import RankConsensus
from lightning_memfit.techniques.core.facts import batch_statistics

_USERS = Rule("users")
_MAX_CUTS = 4
_MAX_LISTED = 1000
"""Possible cuts among which some are chosen."""
_MAX_RUNS = 8
_DIVISORS = (1.0, 2.0**4, 2.0**8, 2.0**12, 2.0**16, 2.0**20)
"""Of the loss, each tried where gradients of 16 bits overflow with the one before; scalers begin at 65536."""
_OK, _OUT_OF_MEMORY, _FAILED, _OVERFLOWED, _UNSEEN = range(5)
_CANNOT_SHOW = (
    "so that nothing could show whether micro-batches give what the whole batch gives. The loss must be a mean over "
    "samples or unmasked label tokens."
)
_ACCEPT = "or accept that they see a micro-batch only: `MicroBatching(allow_batch_statistics=True)`."


@dataclass(frozen=True)
class Tolerance:
    """How far apart rounding may bring numbers.

    Attributes:
        relative: Of the norm of a parameter's own gradient.
        floor: Of the norm of all gradients, for parameters whose own is nearly zero (keys' biases in attention).
        state: Relative, of values that the step writes on the module.
    """

    relative: float
    floor: float
    state: float

    @classmethod
    def of(cls, module: nn.Module, least_bits: int) -> "Tolerance":
        """Return the tolerance for a module in which numbers of some width were computed."""
        widths = [torch.finfo(p.dtype).bits for p in module.parameters() if p.is_floating_point()]
        width = min(widths, default=32)
        if width < 32:
            return cls(0.1, 1e-2, 5e-2)
        if width == 32:
            return cls(1e-3, 1e-5, 1e-4) if least_bits >= 32 else cls(3e-2, 3e-3, 1e-2)
        return cls(1e-8, 1e-10, 1e-9) if least_bits >= 64 else cls(1e-5, 1e-7, 1e-6)


class _NotFinite(Exception):
    """Gradients are infinite or NaN, so that nothing can be told from them.

    Args:
        is_narrow: Whether numbers of 16 bits were computed, which a smaller loss may keep within their range.
    """

    def __init__(self, is_narrow: bool) -> None:
        super().__init__("The gradients of some samples are not finite.")
        self.is_narrow = is_narrow


class _OutOfMemoryElsewhere(Exception):
    """Another rank has run out of memory in the comparison, and has told all."""


class ExactnessCheck:
    """Compares samples together with samples apart, before a batch is split for the first time.

    Args:
        loop: Runs forward and backward.
        splitter: Splits batches.
        weights: The rules of what the loss is a mean over; those that the comparison refutes are left out.
        consensus: Communication between the ranks, which all check together.
        rules: Learn how logged values of parts make that of the whole.
        device_memory: The device's memory; None if it is not limited, so that any batch fits at once.

    Attributes:
        is_done: Whether a check has passed.
        state_rules: How values on the module are put together.
    """

    def __init__(
        self,
        loop: MicroBatchLoop,
        splitter: BatchSplitter,
        weights: LossWeights,
        consensus: RankConsensus,
        rules: LogRules,
        device_memory: DeviceMemory | None,
    ) -> None:
        self._loop = loop
        self._splitter = splitter
        self._weights = weights
        self._consensus = consensus
        self._rules = rules
        self._memory = device_memory
        self._classes: dict[str, list[str]] = {}
        self._slots: dict[str, Slot] = {}
        self._logged: set[str] = set()
        self._unread: set[str] = set()
        self._gone_on: set[str] = set()
        self._seen_at_work: set[tuple[str, str]] = set()
        self._refuted: dict[str, set[str]] = {}
        self._to_judge: set[str] = set()
        self._to_see: set[str] = set()
        self._ignored: set[int] = set()
        self._num_runs = -1
        self._divisor = _DIVISORS[0]
        self.is_done = False
        self.state_rules = StateRules()

    def of_weights(self) -> "ExactnessCheck":
        """Return a check that learns nothing but what losses are means over."""
        return ExactnessCheck(self._loop, self._splitter, self._weights, self._consensus, LogRules(), self._memory)

    def run(self, request: StepRequest, batch: Any, num_samples: int, size: int, has_failed: bool) -> None:
        """Compare samples of a batch, as many as fit.

        Args:
            request: The step.
            batch: The loader batch.
            num_samples: Its number of samples.
            size: The micro-batch size about to be used, which is believed to fit.
            has_failed: Whether memory has just run out with more.

        A batch whose gradients are not finite shows nothing: the check is not done then.

        Raises:
            MisconfigurationException: If micro-batches would give other weights. Nothing has changed then.
        """
        self._num_runs += 1
        # Together and in parts: where memory is limited, no more samples than the batch has.
        count = num_samples
        if self._memory is not None or has_failed:
            # A comparison holds more than a step: what it compares, and on ranks that share one batch a copy of it.
            count = max(2, min(size if self._consensus.can_repeat else size // 2, num_samples // 2))
        self._divisor, larger = _DIVISORS[0], iter(_DIVISORS[1:])
        while True:
            status, failure = self._attempt(request, batch, num_samples, min(count, num_samples), size)
            told: set[float] = {_OUT_OF_MEMORY}
            most = count
            if not isinstance(failure, _OutOfMemoryElsewhere):
                statuses = self._consensus.exchange(status, count)
                told, most = {theirs for theirs, _ in statuses}, int(max(theirs for _, theirs in statuses))
            if status == _FAILED:
                assert failure is not None
                self._raise(failure)
            if _FAILED in told:
                raise MisconfigurationException("Another rank found that micro-batches are not exact; see its error.")
            if failure is not None:
                release(failure)
            if _OUT_OF_MEMORY in told:
                if most <= 2:  # on all ranks alike, whose batches may have different numbers of samples
                    rank_zero_warn(f"MicroBatching: not even two samples fit at once, {_CANNOT_SHOW}")
                    break
                count = max(2, min(count // 2, size))
            elif _OVERFLOWED not in told:
                break
            else:
                self._divisor = next(larger)
        self._agree(batch, num_samples)
        if self._memory is not None:
            self._memory.reset_peak()
        self._to_see.clear()  # what no cut shows is no work of the step: a hook's, for example
        self.is_done = self.is_done or _UNSEEN not in told
        if not self.is_worth_more:
            self._rules.warn_of_doubts()

    def _attempt(
        self, request: StepRequest, batch: Any, num_samples: int, count: int, size: int
    ) -> tuple[int, Exception | None]:
        """Compare on all ranks; return how it went on this one, and the error if it failed."""

        def compare() -> _NotFinite | _OutOfMemoryElsewhere | None:
            try:
                self._compare(request, batch, num_samples, count, size)
                if self._to_judge:  # micro-batches disagree, and no part that was compared writes it
                    reason = _state_reason(min(self._to_judge), batch_statistics(self._loop.module))
                    raise MisconfigurationException(reason)
            except (_NotFinite, _OutOfMemoryElsewhere) as error:
                if self._consensus.stops_together:
                    raise
                return error
            return None

        unseen, failure = self._consensus.together(compare) if num_samples >= 2 else (None, None)
        failure = failure or unseen
        if failure is None or isinstance(failure, _OutOfMemoryElsewhere):
            return _OK, failure
        if isinstance(failure, _NotFinite):
            return _OVERFLOWED if failure.is_narrow and self._divisor < _DIVISORS[-1] else _UNSEEN, failure
        return _OUT_OF_MEMORY if is_out_of_memory(failure) else _FAILED, failure

    def _raise(self, failure: Exception) -> NoReturn:
        layers = batch_statistics(self._loop.module) if isinstance(failure, PartFailed) else []
        if layers:  # which have no statistics of one sample
            raise MisconfigurationException(_normalised(layers)) from failure
        raise failure

    def _agree(self, batch: Any, num_samples: int) -> None:
        """Let all ranks weigh by the same rules: what one has refuted is refuted for all."""
        if self._consensus.world_size == 1 or self._weights.is_users:
            return
        if self._consensus.any_of([self._weights.is_sum])[0]:
            self._weights.take_sum()
            return
        mine = sorted(self._ignored)
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

    @property
    def slots(self) -> list[Slot]:
        """Where the values are that `state_rules` puts together; the step itself may make some of them."""
        return [replace(self._slots[name], holders=()) for name in self.state_rules.names if name in self._slots]

    @property
    def has_doubts(self) -> bool:
        """Whether values are put together in a way that no comparison has seen at work.

        A count of the batches whose loss is low, say, adds up by chance where only that of one part is, and is its own
        mean where that of all parts is.
        """
        rules = self.state_rules
        ways = {
            *(("carried", name) for name in rules.carried - self._unread),
            *(("averaged", n) for n in rules.averaged),
        }
        return bool(ways - self._seen_at_work) and self.is_worth_more

    @property
    def is_worth_more(self) -> bool:
        """Whether another check may settle how logged values are combined; the first few do, or none."""
        return self._num_runs < _MAX_RUNS

    # --- where to cut -----------------------------------------------------------------------------------------------

    def _compare(self, request: StepRequest, batch: Any, num_samples: int, count: int, size: int) -> None:
        """Compare until at most one rule is left and it has been seen at work.

        Raises:
            _NotFinite: If gradients are finite at no cut.
        """
        tried: list[Cut] = []
        unseen, best = [], None
        for cut in self._cuts(batch, num_samples, count, size):
            tried.append(cut)
            try:
                best = self._try(request, batch, num_samples, cut)
            except _NotFinite as error:
                if self._consensus.meets_inside:  # ranks run the same passes
                    raise
                unseen.append(error)
        if len(unseen) == len(tried):
            raise unseen[0]
        for cut in self._doubted(num_samples, count, size, tried) if self._consensus.world_size == 1 else ():
            try:
                self._try(request, batch, num_samples, cut)
            except _NotFinite:
                continue
        if best is None or best.is_usual:
            return
        # A rare rule needs more than a coincidence: another cut, at which it differs from the usual ones.
        for cut in _other_cuts(num_samples, count, tried):
            shares = self._shares(batch, num_samples, cut)
            share, *usual = (shares[r][0] for r in (best, *(r for r in shares if r.is_usual)) if r in shares)
            if 0.0 < share < 1.0 and all(abs(share - other) > 1e-6 for other in usual):
                self._try(request, batch, num_samples, cut)
                return

    def _cuts(self, batch: Any, num_samples: int, count: int, size: int) -> Iterator[Cut]:
        if count == num_samples:
            halves = (min(size, count - 1), count // 3, count - 1, count // 2)
            first = max(1, halves[self._num_runs % len(halves)])
            first -= 2 * first == count > 2  # unequal parts tell more ways to combine values apart
            yield Cut(0, first, count - first)
        else:
            least = 2 if count >= 4 else 1
            firsts = (max(least, count // 3), max(least, count // 2), max(least, count - least))
            first = firsts[self._num_runs % len(firsts)]
            number = max(1, min(_MAX_CUTS, num_samples // (2 * count)))
            room = num_samples - count
            for index in range(number):
                offset = (index * room // number + self._num_runs * max(1, room // 2)) % (room + 1)
                yield Cut(offset, first, count - first)
        for _ in range(_MAX_CUTS):  # where rules that are left differ
            cut = self._disputed(batch, num_samples, count)
            if cut is None:
                return
            yield cut

    def _doubted(self, num_samples: int, count: int, size: int, tried: list[Cut]) -> Iterator[Cut]:
        """Yield further cuts as long as there are doubts: micro-batches beside each other, and any others."""
        least, part = min(2, size) if count >= 4 else 1, max(1, min(size, count // 2))
        for cuts in (_neighbours(num_samples, part), _other_cuts(num_samples, count, tried)):
            if not (self.has_doubts or self._to_see):
                return
            for cut in _spread(cuts):
                if min(cut.sizes) >= least and (self.has_doubts or self._to_see):
                    tried.append(cut)
                    yield cut

    def _disputed(self, batch: Any, num_samples: int, count: int) -> Cut | None:
        """Return the cut at which rules that may be right differ most; None if they agree everywhere."""
        if self._weights.is_users or self._weights.is_sum:
            return None
        rules = list(self._weights.weights(batch, num_samples).values())
        best, found = 1e-6, None
        firsts = sorted({1, max(1, count // 3), count // 2, count - 1})
        for start in range(num_samples - count + 1) if len(rules) > 1 else ():
            for first in firsts:
                shares = [_share(rows[start : start + first], rows[start : start + count]) for rows in rules]
                spread = max(shares) - min(shares)
                if spread > best * (1 + 1e-6):
                    best, found = spread, Cut(start, first, count - first)
        return found

    # --- one comparison ---------------------------------------------------------------------------------------------

    def _try(self, request: StepRequest, batch: Any, num_samples: int, cut: Cut) -> Rule | None:
        """Compare at a cut, in the parameters' own precision if the module can be run so.

        Returns:
            The rule by which the parts give the whole; None if nothing could show it.

        Raises:
            MisconfigurationException: If there is none.
            _NotFinite: If gradients are not finite.
        """
        is_mixed = isinstance(self._loop.trainer.precision_plugin, MixedPrecision)
        arguments = (self._loop, request, self._splitter, batch, num_samples, cut)
        try:
            with Comparison(*arguments, autocast=False, divisor=self._divisor) as runs:
                return self._judge(runs, batch, num_samples)
        except Exception as error:
            verdicts = (MisconfigurationException, _NotFinite, _OutOfMemoryElsewhere)
            is_judged = isinstance(error, verdicts) and not isinstance(error, PartFailed)
            if not is_mixed or is_judged or is_out_of_memory(error):
                raise
            release(error)
        with Comparison(*arguments, autocast=True, divisor=self._divisor) as runs:
            return self._judge(runs, batch, num_samples)

    def _judge(self, runs: Comparison, batch: Any, num_samples: int) -> Rule | None:
        whole, one = runs.whole(), runs.part(0)
        two = runs.part(1, after=one)
        is_finite = not self._anywhere(not whole.is_finite)
        module = self._loop.module
        tolerance = Tolerance.of(module, runs.least_bits)
        self._ignored |= runs.ignored
        self._weights.ignore(runs.ignored)
        shares = self._shares(batch, num_samples, runs.cut, runs.parts)
        likeliest = next((list(parts) for rule, parts in shares.items() if rule != SUM), None)
        sizes = [float(size) for size in runs.cut.sizes]
        carried = self._judge_state(runs, whole, one, two, likeliest or sizes, tolerance, is_finite)
        if carried:
            two = runs.part(1, after=one, carried=carried)
        if not is_finite:
            raise _NotFinite(runs.least_bits < 32)
        matching = _matching(whole, one, two, shares, tolerance)
        if not matching and one.draws_on_host:
            two = runs.part(1, after=one, carried=carried, continues_random=True)
            matching = _matching(whole, one, two, shares, tolerance)
        draws = whole.draws_on_host or one.draws_otherwise or two.draws_otherwise
        has_overflowed = not (matching or draws or (one.is_finite and two.is_finite))
        if runs.least_bits < 32 and self._divisor < _DIVISORS[-1] and self._anywhere(has_overflowed):
            raise _NotFinite(is_narrow=True)  # of a part, whose samples' mean may be larger
        if matching:
            right = self._settle(matching, shares)
            if not (one.draws_otherwise or two.draws_otherwise):
                weights = sizes if right == SUM else list(shares[right])
                self._rules.learn(whole.values, [one.values, two.values], weights, runs.cut.sizes, tolerance.state)
                self._warn_of_loggers({name for logger in runs.loggers for name in logger.names})
                check_metrics(whole.metrics, two.metrics, max(tolerance.state, 1e-5))
                if whole.written.keys() - self._gone_on:
                    self._gone_on |= whole.written.keys()
                    self._judge_next(runs, whole, shares[right], weights, tolerance)
            return right
        if draws:
            rank_zero_warn(
                "MicroBatching: `training_step` draws random numbers in a way that depends on the batch size and can't "
                f"be followed, {_CANNOT_SHOW}"
            )
            return None
        solution = _solve(whole, one, two, tolerance)
        raise MisconfigurationException(_reason(runs.cut, solution, shares.get(_USERS), batch_statistics(module)))

    def _judge_next(
        self, runs: Comparison, before: Pass, share: tuple[float, float], weights: list[float], tolerance: Tolerance
    ) -> None:
        """Compare once more from what the samples together have written on the module.

        The first step may set what later ones read: the loss that they are divided by, the least loss so far.

        Raises:
            MisconfigurationException: If the parts then give another gradient, or other values on the module.
        """
        runs.go_on_from(before)
        whole, one = runs.whole(), runs.part(0)
        two = runs.part(1, after=one)
        if self._anywhere(not (whole.is_finite and one.is_finite and two.is_finite)):
            return
        if carried := self._judge_state(runs, whole, one, two, weights, tolerance, is_finite=True):
            two = runs.part(1, after=one, carried=carried)
        if _distance(whole, one, two, *share, tolerance) <= 1.0:
            self._rules.learn(whole.values, [one.values, two.values], weights, runs.cut.sizes, tolerance.state)
        elif not (whole.draws_on_host or one.draws_otherwise or two.draws_otherwise):
            raise MisconfigurationException(
                _reason(runs.cut, _solve(whole, one, two, tolerance), None, batch_statistics(self._loop.module))
                + f" This is so from the second step on: the first one sets {_quoted(before.written)}."
            )

    def _anywhere(self, is_so: bool) -> bool:
        """Return whether something is so on any rank, where each sees its part of the gradients alone.

        All of them run the same passes: those that can't stop together would wait for each other.

        Raises:
            _OutOfMemoryElsewhere: If another rank doesn't come, having run out of memory.
        """
        if self._consensus.stops_together or not self._consensus.meets_inside:
            return is_so
        told = self._consensus.exchange(_OK, is_so)
        if any(status == _OUT_OF_MEMORY for status, _ in told):
            raise _OutOfMemoryElsewhere
        return any(flag for _, flag in told)

    def _warn_of_loggers(self, names: set[str]) -> None:
        if names - self._logged:
            rank_zero_warn(
                f"`training_step` writes {', '.join(f'`{name}`' for name in sorted(names))} to the logger itself: once "
                "per micro-batch, with the micro-batch's values. `self.log` writes once, with the whole batch's."
            )
        self._logged |= names

    def _shares(
        self, batch: Any, num_samples: int, cut: Cut, parts: list[Any] | None = None
    ) -> dict[Rule, tuple[float, float]]:
        """Return by what each rule multiplies the gradients of the two parts."""
        if self._weights.is_users:
            if parts is None:
                return {}
            one, two = (self._weights.read(p, size).weight for p, size in zip(parts, cut.sizes, strict=True))
            return {_USERS: (one / (one + two), two / (one + two))} if one + two else {}
        if self._weights.is_sum:
            return {SUM: (1.0, 1.0)}
        found: dict[Rule, tuple[float, float]] = {}
        for rule, rows in self._weights.weights(batch, num_samples).items():
            values = rows[cut.offset : cut.offset + cut.count]
            if sum(values):
                found[rule] = (_share(values[: cut.first], values), _share(values[cut.first :], values))
        found[SUM] = (1.0, 1.0)
        return found

    def _settle(self, matching: dict[Rule, float], shares: dict[Rule, tuple[float, float]]) -> Rule:
        """Keep the rules that give what the right one gives here, and refute the others."""
        if self._weights.is_users or self._weights.is_sum:
            return next(iter(matching))
        averages = [rule for rule in matching if rule != SUM]
        if not averages:
            self._weights.take_sum()
            return SUM
        best = min(averages, key=matching.__getitem__)
        # Rounding may leave several; a less likely one has to be far nearer.
        right = best if matching[averages[0]] > 10 * matching[best] + 1e-3 else averages[0]
        share = shares[right][0]
        self._weights.refute(rule for rule, (mine, _) in shares.items() if rule != SUM and abs(mine - share) > 1e-9)
        return right

    # --- what the step writes on the module -------------------------------------------------------------------------

    def _judge_state(
        self,
        runs: Comparison,
        whole: Pass,
        one: Pass,
        two: Pass,
        weights: list[float],
        tolerance: Tolerance,
        is_finite: bool,
    ) -> list[str]:
        """Find how values on the module are put together; return those that micro-batches hand on to the next.

        Raises:
            MisconfigurationException: If the parts' values don't give the whole's.
            _NotFinite: If gradients would have to show whether that matters.
        """
        changed = [
            name
            for name in dict.fromkeys((*whole.after, *one.after, *two.after))
            if any(not alike(run.before.get(name), run.after.get(name), 0.0) for run in (whole, one, two))
        ]
        if not changed:
            return []
        for run in (whole, one, two):
            self._slots.update((name, slot) for name, (slot, _, _) in run.written.items())
        after_one = runs.part(1, after=one, carried=changed)
        written = [name for name in changed if name in runs.trained]
        # Masks and limits give the same weights whatever the batch is, and however often they are applied.
        unlike = [n for n in written if not all(alike(whole.after.get(n), run.after.get(n), 0.0) for run in (one, two))]
        if written and not unlike:
            unlike = written if self._consensus.meets_inside else runs.change_again(written)
        if unlike:
            raise MisconfigurationException(_state_reason(unlike[0], batch_statistics(self._loop.module)))
        self._classes.update((name, ["carried"]) for name in written)
        self._unread.update(written)
        self._to_see.difference_update(written)
        self._to_judge.difference_update(written)
        odd: list[str] = []
        for name in changed:
            if name in written:
                continue
            found = _ways(name, whole, one, two, after_one, runs.cut.sizes, weights, tolerance.state)
            self._note_work(name, found, one, two, after_one, tolerance.state)
            found = [way for way in found if way not in self._refuted.get(name, ())]
            before = self._classes.get(name)
            self._classes[name] = found if before is None else [way for way in before if way in found]
            self._to_judge.discard(name)
            self._to_see.discard(name)
            if not self._classes[name]:
                odd.append(name)
        if odd and not is_finite:  # whether the step reads them doesn't show
            for name in odd:
                del self._classes[name]
            raise _NotFinite(runs.least_bits < 32)
        if odd:
            self._accept_unread(runs, whole, (whole, one, two), odd, tolerance)
        self._make_rules()
        return sorted(self.state_rules.carried)

    def _note_work(self, name: str, ways: list[str], one: Pass, two: Pass, after_one: Pass, near: float) -> None:
        """Note which ways to put a value together were more than a chance: both parts have changed it, or unlike."""
        before, after = one.before.get(name), one.after.get(name)
        if "carried" in ways and name in after_one.written and not alike(before, after, 0.0):
            self._seen_at_work.add(("carried", name))
        if "averaged" in ways and not _reaches(after, two.after.get(name), before, near):
            self._seen_at_work.add(("averaged", name))

    def _accept_unread(
        self, runs: Comparison, whole: Pass, written_by: Iterable[Pass], names: list[str], tolerance: Tolerance
    ) -> None:
        """Accept values that no way puts together if the step does not read them: records of calls, for example.

        Whatever a pass has written is tried: the samples together may leave alone what a part of them changes.

        Raises:
            MisconfigurationException: If gradients, the loss or logged values depend on them.
        """
        module = self._loop.module
        saved = {name for name, _ in (*module.named_buffers(), *module.named_parameters())}
        if kept := [name for name in names if name in saved]:  # evaluation and checkpoints read these
            raise MisconfigurationException(_state_reason(kept[0], batch_statistics(module)))
        for before in written_by:
            if before.written.keys().isdisjoint(names):
                continue
            again = runs.whole(after=before, carried=names)
            logs = [[call.value for call in one.logs if not isinstance(call.value, Metric)] for one in (whole, again)]
            is_read = _distance(whole, again, again, 1.0, 0.0, tolerance) > 1.0
            if is_read or not alike(reading_of(logs[0]), reading_of(logs[1]), tolerance.state):
                raise MisconfigurationException(_state_reason(names[0], batch_statistics(module)))
        if not self._unread.issuperset(names):
            rank_zero_warn(
                f"`training_step` changes {', '.join(f'`{name}`' for name in names)} of the module per micro-batch: "
                "not what the whole batch would make of it. The step does not read it, so that training is exact; "
                "whatever else reads it finds a value per micro-batch."
            )
        self._unread.update(names)
        self._classes.update((name, ["carried"]) for name in names)

    def look_for(self, names: Iterable[str]) -> None:
        """Have the next check cut where the step writes some names, as micro-batches have done."""
        self._to_see.update(names)

    def refute(self, names: Collection[str]) -> None:
        """Note that what micro-batches have written under some names can't be put together as it seemed.

        Where no other way is left, the next check shows whether the step reads them.
        """
        for name in names:
            way, *others = self._classes[name]
            self._refuted.setdefault(name, set()).add(way)
            if others:
                self._classes[name] = others
            else:
                del self._classes[name]
                self._to_judge.add(name)
        self._make_rules()

    def _make_rules(self) -> None:
        ways = {name: found[0] for name, found in self._classes.items()}
        self.state_rules = StateRules(
            **{way: frozenset(n for n, mine in ways.items() if mine == way) for way in StateRules.ways()},
            unproven=frozenset(n for n, found in self._classes.items() if found[0] == "restored" and len(found) > 1),
            agreed=frozenset(n for n, found in self._classes.items() if found == ["restored"] and self._is_seen(n)),
        )

    def _is_seen(self, name: str) -> bool:
        """Whether micro-batches are compared in what they write under a name, in every step."""
        slot = self._slots.get(name)
        return slot is not None and is_small(slot.read())


# --- comparing gradients --------------------------------------------------------------------------------------------


def _share(part: list[float], whole: list[float]) -> float:
    return sum(part) / sum(whole) if sum(whole) else 0.0


def _other_cuts(num_samples: int, count: int, tried: list[Cut]) -> Iterator[Cut]:
    for start in range(num_samples - count + 1):
        for first in range(1, count):
            cut = Cut(start, first, count - first)
            if cut not in tried:
                yield cut


def _neighbours(num_samples: int, size: int) -> Iterator[Cut]:
    """Cut between micro-batches beside each other, of a size."""
    for start in range(0, num_samples - size, size):
        yield Cut(start, size, min(size, num_samples - start - size))


def _spread(cuts: Iterable[Cut]) -> list[Cut]:
    """Return some of many cuts, as different as they can be."""
    found = list(islice(cuts, _MAX_LISTED))
    return [found[index * len(found) // _MAX_CUTS] for index in range(min(_MAX_CUTS, len(found)))]


def _matching(
    whole: Pass, one: Pass, two: Pass, shares: dict[Rule, tuple[float, float]], tolerance: Tolerance
) -> dict[Rule, float]:
    """Return the rules by which the parts give the whole, and how far they are from it, in tolerances."""
    found = {rule: _distance(whole, one, two, *parts, tolerance) for rule, parts in shares.items()}
    return {rule: distance for rule, distance in found.items() if distance <= 1.0}


def _distance(whole: Pass, one: Pass, two: Pass, a: float, b: float, tolerance: Tolerance) -> float:
    """Return how far the weighted sum of the parts is from the whole, in tolerances; a part of no weight may be nan.

    Numbers that are not finite are infinitely far from any.
    """
    mixed = torch.zeros_like(whole.sketch)
    for share, run in ((a, one), (b, two)):
        if share:
            mixed += share * run.sketch
    norms = torch.maximum(whole.sketch.norm(dim=1), mixed.norm(dim=1))
    gradients = torch.cat([norms[:-1].square().sum().sqrt().expand(len(norms) - 1), norms[-1:]])
    allowed = tolerance.relative * norms + tolerance.floor * gradients + 1e-300
    distance = float(((mixed - whole.sketch).norm(dim=1) / allowed).max())
    return distance if distance == distance else float("inf")


def _solve(whole: Pass, one: Pass, two: Pass, tolerance: Tolerance) -> tuple[float, float] | None:
    """Return the weights by which the parts give the whole; None if no weights do."""
    columns = torch.stack([one.sketch.flatten(), two.sketch.flatten()], dim=1)
    if not bool(torch.isfinite(columns).all() and torch.isfinite(whole.sketch).all()):
        return None
    a, b = torch.linalg.lstsq(columns, whole.sketch.reshape(-1, 1)).solution.flatten().tolist()
    return (a, b) if _distance(whole, one, two, a, b, tolerance) <= 1.0 else None


# --- comparing values on the module ---------------------------------------------------------------------------------


def _ways(
    name: str,
    whole: Pass,
    one: Pass,
    two: Pass,
    after_one: Pass,
    sizes: tuple[int, int],
    weights: list[float],
    near: float,
) -> list[str]:
    """Return the ways in which the parts' values of a name give the whole's, the simplest first.

    Args:
        name: Where the value is on the module.
        whole: The pass over all samples.
        one: The pass over the first part.
        two: The pass over the second part, from the same start.
        after_one: The same, going on with what the first part left.
        sizes: Samples in the parts.
        weights: What their losses are means over, by the likeliest rule.
        near: Relative difference that rounding may make.
    """
    before, target = whole.before.get(name), whole.after.get(name)
    a, b = one.after.get(name), two.after.get(name)

    def is_target(value: Any) -> bool:
        return _reaches(target, value, before, near)

    found = []
    if is_target(a) and is_target(b):
        found.append("restored")
    if is_target(after_one.after.get(name)):
        found.append("carried")
    lists = [value for value in (before, target, a, b) if isinstance(value, list)]
    added = added_alike(lists[0], lists[1:], _same) if len(lists) == 4 else None
    if added and all(
        alike(item, reading_of(merge_kept([x, y], weights, list(sizes))), near)
        for item, x, y in zip(*(one.items for one in added), strict=True)
    ):
        found.append("merged")
    if isinstance(a, (float, Tensor)) and type(a) is type(b):
        addable = not isinstance(a, Tensor) or (a.is_floating_point() and a.shape == b.shape)  # type: ignore[union-attr]
        if addable and is_target((a * sizes[0] + b * sizes[1]) / sum(sizes)):  # type: ignore[operator]
            found.append("averaged")
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.ndim and (len(a), len(b)) == sizes:
        joined = reading_of(merge([a, b], weights, list(sizes)))
        if alike(target, joined, near):
            found.append("joined")
    return found


def _same(one: Any, other: Any) -> bool:
    return alike(one, other, 0.0)


def _reaches(target: Any, found: Any, before: Any, near: float) -> bool:
    """Whether a value is the target's up to rounding, of which the change from the value before is the measure."""
    one, other, start = (
        torch.as_tensor(value, dtype=torch.float64) if isinstance(value, float) else value
        for value in (target, found, before)
    )
    if not all(isinstance(value, Tensor) and value.is_floating_point() for value in (one, other, start)):
        return alike(target, found, near)
    if not one.shape == other.shape == start.shape or not one.numel():
        return alike(target, found, near)
    change, size = (one - start).abs().max(), one.abs().max()
    allowed = near * change + 16 * torch.finfo(one.dtype).eps * size
    return bool((one - other).abs().max() <= allowed)


# --- words ----------------------------------------------------------------------------------------------------------


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _reason(
    cut: Cut, solution: tuple[float, float] | None, users: tuple[float, float] | None, layers: list[str]
) -> str:
    head = (
        f"Micro-batches would give other weights than the whole batch: the gradient of {cut.count} samples is not the "
        f"mean of those of {cut.first} and {cut.second} of them"
    )
    if solution is not None and users is not None:
        return (
            f"{head} weighted {users[0]:.4g} to {users[1]:.4g}, as `loss_weight` says, but {solution[0]:.4g} to "
            f"{solution[1]:.4g}."
        )
    if solution is not None:
        return (
            f"{head}: they count {solution[0]:.4g} and {solution[1]:.4g} times. What the loss is a mean over is "
            "nothing that the batch shows (samples, unmasked labels, masks, class weights). Return a mean over "
            "samples, or define `loss_weight(batch)`, the number that the loss of a batch is averaged over."
        )
    if layers:
        return f"{head}. {_normalised(layers)}"
    return (
        f"{head}, however they are weighted. Samples affect each other (in-batch contrastive losses, statistics of the "
        "batch, mixing of samples), the loss has several means that count different things, or the batch is cut in the "
        "wrong place. Define `split_batch(batch, sizes)` if the cut is wrong, return a mean over samples if there are "
        f"several, {_ACCEPT}"
    )


def _state_reason(name: str, layers: list[str]) -> str:
    if any(name.startswith(layer) for layer in layers):
        return _normalised(layers)
    return (
        f"`training_step` changes `{name}` of the module, and what micro-batches make of it is not what the whole "
        "batch makes of it. Change it in `on_train_batch_end`, which is called once per batch, keep the whole share in "
        f"one micro-batch, {_ACCEPT}"
    )


def _normalised(layers: list[str]) -> str:
    return (
        f"{len(layers)} BatchNorm layers ({', '.join(layers[:3])}{', ...' if len(layers) > 3 else ''}) normalise with "
        "the statistics of their batch: with micro-batches they are those of the micro-batch, and results change. "
        f"Replace them by GroupNorm or LayerNorm, freeze them with `.eval()`, {_ACCEPT}"
    )
