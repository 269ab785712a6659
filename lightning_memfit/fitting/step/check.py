"""`SelfCheck`: whether the parts of a batch give what the batch gives, measured on the user's own step and data.

Samples are run together and in two unequal parts by the code that training runs, from one state and twice in a row:
what the first turn sets and the second one reads shows there. Gradients, the loss, buffers and frozen weights have to
agree. What the loss is a mean over is found by trying candidates: a wrong one can't do harm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_memfit.fitting.recovery.retry import Outcome, ShortElsewhere, outcome_of, tell
from lightning_memfit.fitting.recovery.step_state import Saved, alike, is_look
from lightning_memfit.fitting.step.accumulation import Accumulation
from lightning_memfit.fitting.step.loop import Fitting, StepRequest
from lightning_memfit.fitting.step.loss_weights import IGNORE_INDEX, SUM, Rule
from lightning_memfit.fitting.step.outputs import differing
from lightning_memfit.fitting.step.passes import NotFiniteError, PartFailedError, Pass, Passes, normalised
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.techniques.core.facts import batch_statistics

_USERS = Rule("users")
_MAX_WINDOWS = 4
_ACCEPT = "or keep the whole share in one micro-batch."


class Tolerance(NamedTuple):
    """How far apart rounding may bring gradients, relative to their own norm and that of all, and state."""

    relative: float
    floor: float  # for parameters whose own gradient is nearly zero (keys' biases in attention)
    state: float


def tolerance_of(module: nn.Module, *passes: Pass) -> Tolerance:
    """Return the tolerance for passes of a module."""
    least_bits = min(one.least_bits for one in passes)
    width = min((torch.finfo(p.dtype).bits for p in module.parameters() if p.is_floating_point()), default=32)
    if width < 32:
        return Tolerance(0.1, 1e-2, 5e-2)
    if width == 32:
        return Tolerance(1e-3, 1e-5, 1e-4) if least_bits >= 32 else Tolerance(3e-2, 3e-3, 1e-2)
    return Tolerance(1e-8, 1e-10, 1e-9) if least_bits >= 64 else Tolerance(1e-5, 1e-7, 1e-6)


@dataclass(frozen=True)
class Samples:
    """What is compared: `count` samples at once of a batch that is about to run in micro-batches of a size."""

    request: StepRequest
    batch: Any
    num_samples: int
    count: int
    size: int


class SelfCheck:
    """Compares samples together with samples apart: at split steps 1, 2, 4 ... 64, and at new kinds of cuts.

    Candidates for what the loss is a mean over that a comparison refutes are left out of `weights`; what steps write on
    the module is left in `accumulation`. `is_done` says whether a check has passed.
    """

    def __init__(self, fitting: Fitting, accumulation: Accumulation) -> None:
        self._loop, self._splitter, self._weights = fitting.loop, fitting.splitter, fitting.weights
        self._consensus, self._memory = fitting.consensus, fitting.memory
        self._accumulation = accumulation
        self._holds_statistics = fitting.options.allow_batch_statistics
        self._passes = Passes(fitting.loop, accumulation, self._holds_statistics)
        self._last_number = self._num_runs = 0
        self._cuts: set[frozenset[Any]] = set()
        self._warned: set[str] = set()
        self.is_done = False

    def is_due(self, batch: Any, number: int) -> bool:
        """Whether the split step of a number, counted from 1, is to be checked."""
        if not self.is_done:
            return True
        return (is_look(number) and number != self._last_number) or self._splitter.cuts(batch) not in self._cuts

    def run(
        self, request: StepRequest, batch: Any, num_samples: int, size: int, has_failed: bool, number: int = 0
    ) -> None:
        """Compare samples of a batch, as many as fit, and put everything back.

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
        while True:
            outcome, failure = self._attempt(Samples(request, batch, num_samples, count, size))
            told, most = {float(Outcome.OUT_OF_MEMORY)}, count
            if not isinstance(failure, ShortElsewhere):
                outcomes, counts = zip(*tell(self._consensus, outcome, failure, "before this step", count), strict=True)
                told, most = set(outcomes), int(max(counts))
            if failure is not None:
                release(failure)
            if Outcome.OUT_OF_MEMORY in told:
                if most <= 2:  # on all ranks alike, whose batches may have different numbers of samples
                    rank_zero_warn(
                        "MicroBatching: not even two samples fit at once, so that nothing could show whether "
                        "micro-batches give what the whole batch gives. The loss must be a mean over samples or "
                        "unmasked label tokens."
                    )
                    break
                count = max(2, min(count // 2, size))
            else:
                break
        self._agree(batch, num_samples)
        self._warn_of_loggers()
        if self._memory is not None:
            self._memory.reset_peak()
        if Outcome.UNSEEN not in told:
            self.is_done = True
            self._cuts.add(self._splitter.cuts(batch))

    def _warn_of_loggers(self) -> None:
        if names := self._passes.logger_names - self._warned:
            self._warned |= names
            rank_zero_warn(
                f"`training_step` writes {', '.join(f'`{name}`' for name in sorted(names))} to the logger itself: once "
                "per micro-batch, with the micro-batch's values. `self.log` writes once, with the whole batch's."
            )

    def _attempt(self, samples: Samples) -> tuple[Outcome, Exception | None]:
        """Compare on all ranks; return how it went on this one, and the error if it failed."""
        if samples.num_samples < 2:
            return Outcome.OK, None

        def compare() -> Exception | None:
            try:
                self._compare_precisely(samples)
            except (NotFiniteError, ShortElsewhere) as error:
                if self._consensus.stops_together:
                    raise
                return error
            return None

        unseen, failure = self._consensus.together(compare)
        failure = failure or unseen
        if failure is None or isinstance(failure, ShortElsewhere):
            return Outcome.OK, failure
        if isinstance(failure, NotFiniteError):
            return Outcome.UNSEEN, failure
        return outcome_of(failure), failure

    def _agree(self, batch: Any, num_samples: int) -> None:
        """Let all ranks weigh by the same rules: what one has refuted is refuted for all."""
        if self._consensus.world_size == 1 or self._weights.is_users:
            return
        if self._consensus.any_of([self._weights.is_sum])[0]:
            self._weights.take_sum()
            return
        mine = (*sorted(self._passes.ignored), *[IGNORE_INDEX] * 4)[:4]
        self._weights.ignore(int(value) for told in self._consensus.exchange(*mine) for value in told)
        rules, refuted = self._weights.all_rules(batch, num_samples), self._weights.refuted
        if len({length for (length,) in self._consensus.exchange(len(rules))}) > 1:
            raise MisconfigurationException(
                "The batches of the ranks are built differently, so that they can't agree by what to weigh "
                "micro-batches. Define `loss_weight(batch)`, the number that the loss of a batch is averaged over."
            )
        if rules:
            told = self._consensus.any_of([rule in refuted for rule in rules])
            self._weights.refute(rule for rule, is_refuted in zip(rules, told, strict=True) if is_refuted)

    # --- comparisons ------------------------------------------------------------------------------------------------

    def _compare_precisely(self, samples: Samples) -> None:
        """Compare in the parameters' own precision if the module can be run so."""
        if isinstance(self._loop.trainer.precision_plugin, MixedPrecision):
            try:
                with self._passes.undone(autocast=False):
                    return self._compare_all(samples)
            except Exception as error:
                is_judged = isinstance(error, (MisconfigurationException, NotFiniteError, ShortElsewhere))
                if (is_judged and not isinstance(error, PartFailedError)) or is_out_of_memory(error):
                    raise
                release(error)
        with self._passes.undone(autocast=True):
            return self._compare_all(samples)

    def _compare_all(self, samples: Samples) -> None:
        """Compare some samples twice in a row, each time cut elsewhere, and others where candidates still differ."""
        room = samples.num_samples - samples.count
        step = max(1, room // (_MAX_WINDOWS - 1))
        begin = self._num_runs * step % (room + 1)
        offsets = [begin, *(min(index * step, room) for index in range(_MAX_WINDOWS))]
        self._num_runs += 1
        start = self._passes.state()
        first_offset, first = self._most_disputed(samples) or (begin, 0)
        unseen: NotFiniteError | None = None
        for offset in dict.fromkeys((first_offset, *offsets)):
            try:
                self._compare(samples, offset, first, start)
                break
            except NotFiniteError as error:
                unseen = error
                if self._consensus.meets_inside:  # ranks run the same passes
                    raise
        else:
            assert unseen is not None
            raise unseen
        for _ in range(_MAX_WINDOWS):
            found = self._most_disputed(samples)
            if found is None:
                return
            self._compare(samples, *found, start)

    def _compare(self, samples: Samples, offset: int, first: int, start: Saved) -> None:
        """Compare samples twice in a row: those from an offset on, and those as far from the end of the batch."""
        count, num_samples = samples.count, samples.num_samples
        room = num_samples - count
        starts = (start, start)
        others = room - offset if 2 * offset != room else 0
        for turn, at in enumerate(_firsts(num_samples, count, samples.size, first)):
            offset = others if turn else offset
            window = samples.batch
            if room:
                around = [one for one in (offset, count, room - offset) if one]
                window = self._splitter.split(samples.batch, around)[1 if offset else 0]
            sizes = [at, count - at]
            whole = self._passes.run(samples.request, [window], [count], [1.0], starts[0], num_samples)
            self._weights.ignore(self._passes.ignored)
            ended = self._passes.state()
            if self._anywhere(not whole.shows):
                if turn:
                    return
                raise NotFiniteError
            parts, weights = self._first_right(samples, window, offset, sizes, whole, starts[1], turn)
            self._judge_state(whole, parts)
            self._judge_logs(whole, parts, sizes, weights, turn)
            starts = (ended, self._passes.state())

    def _most_disputed(self, samples: Samples) -> tuple[int, int] | None:
        """Return where candidates that may be right weigh two parts most differently; None if they agree everywhere."""
        if self._weights.is_users or self._weights.is_sum:
            return None
        count, num_samples = samples.count, samples.num_samples
        rules = list(self._weights.weights(samples.batch, num_samples).values())
        best, found = 1e-6, None
        least = _least(count, samples.size)
        firsts = sorted({least, max(least, count // 3), count // 2, count - least})
        for offset in range(num_samples - count + 1) if len(rules) > 1 else ():
            for first in firsts:
                shares = [_share(rows[offset : offset + first], rows[offset : offset + count]) for rows in rules]
                if max(shares) - min(shares) > best * (1 + 1e-6):
                    best, found = max(shares) - min(shares), (offset, first)
        return found

    def _first_right(
        self,
        samples: Samples,
        window: Any,
        offset: int,
        sizes: list[int],
        whole: Pass,
        start: Saved,
        turn: int,
    ) -> tuple[Pass, list[float]]:
        """Return the pass over the parts that gives the whole, and how they weigh in it.

        The likeliest candidate is tried first. If it is wrong, the parts are run alone, which tells which one is right.
        """
        parts = self._splitter.split(window, sizes)
        shares = self._shares(samples, offset, parts, sizes)
        run = partial(self._passes.run, samples.request, start=start, num_samples=samples.num_samples)
        likeliest = next(iter(shares))
        found = run(parts, sizes, shares[likeliest])
        tolerance = tolerance_of(self._loop.module, whole, found)
        if not self._anywhere(_distance(whole, found.sketch, tolerance) > 1.0):
            if likeliest.is_usual or 0.0 < shares[likeliest][0] < 1.0:
                self._settle_rules(likeliest, shares)
            return found, shares[likeliest]
        is_state = False
        alone = [run([part], [size], [1.0]) for part, size in zip(parts, sizes, strict=True)]
        shows = [one.shows for one in alone]
        for rule, (a, b) in shares.items():
            if not rule.is_usual and any(not share and shown for share, shown in zip((a, b), shows, strict=True)):
                continue  # that one of two parts counts may be chance, unless nothing in the other counts
            mixed = sum(
                share * one.sketch for share, one in zip((a, b), alone, strict=True) if share
            ) + torch.zeros_like(whole.sketch)
            if self._anywhere(_distance(whole, mixed, tolerance) > 1.0):
                continue
            is_state = True
            found = run(parts, sizes, [a, b])
            if not self._anywhere(_distance(whole, found.sketch, tolerance) > 1.0):
                self._settle_rules(rule, shares, shows)
                return found, [a, b]
        has_overflowed = not all(one.is_finite for one in (found, *alone))
        if min(one.least_bits for one in alone) < 32 and self._anywhere(has_overflowed):
            raise NotFiniteError  # a part's gradients, whose samples' mean may be larger, overflow in 16 bits
        solution = _solve(whole, alone, tolerance)
        if is_state:
            raise MisconfigurationException(_ONE_AFTER_THE_OTHER.format(*sizes, self._written_words()))
        raise MisconfigurationException(self._reason(sizes, solution, shares.get(_USERS), turn))

    def _anywhere(self, is_so: bool) -> bool:
        """Return whether something is so on any rank, where each sees its part of the gradients alone.

        All of them run the same passes: they would wait for each other otherwise.
        """
        return bool(self._consensus.highest(int(is_so))) if self._consensus.meets_inside else is_so

    def _shares(self, samples: Samples, offset: int, parts: list[Any], sizes: list[int]) -> dict[Rule, list[float]]:
        """Return by what each candidate multiplies the losses of the two parts, the likeliest first."""
        if self._weights.is_users:
            counted = [self._weights.read(part, size).weight for part, size in zip(parts, sizes, strict=True)]
            return {_USERS: [one / (sum(counted) or 1.0) for one in counted]}
        if self._weights.is_sum:
            return {SUM: [1.0, 1.0]}
        found: dict[Rule, list[float]] = {}
        for rule, rows in self._weights.weights(samples.batch, samples.num_samples).items():
            values = rows[offset : offset + sum(sizes)]
            if total := sum(values):
                found[rule] = [sum(values[: sizes[0]]) / total, sum(values[sizes[0] :]) / total]
        return found | {SUM: [1.0, 1.0]}

    def _settle_rules(self, right: Rule, shares: dict[Rule, list[float]], shows: Sequence[bool] = (True, True)) -> None:
        """Refute the candidates that would have weighed parts otherwise, of those that show it."""
        if right == SUM:
            if all(shows):
                self._weights.take_sum()
        elif right != _USERS:
            wrong = [
                rule
                for rule, theirs in shares.items()
                if any(
                    shown and abs(one - other) > 1e-9
                    for one, other, shown in zip(theirs, shares[right], shows, strict=True)
                )
            ]
            self._weights.refute(rule for rule in wrong if rule != SUM)

    # --- what a step leaves -----------------------------------------------------------------------------------------

    def _judge_state(self, whole: Pass, parts: Pass) -> None:
        """Refuse parts that leave other weights, buffers or frozen weights than the whole, which checkpoints hold."""
        module = self._loop.module
        tolerance = tolerance_of(module, whole, parts).state
        layers = [] if self._holds_statistics else batch_statistics(module)
        for name, weight in whole.weights.items():
            if not alike(weight, parts.weights[name], tolerance):
                raise MisconfigurationException(_state_reason(name, layers))
        saved = {name for name, _ in (*module.named_buffers(), *module.named_parameters())}
        names = dict.fromkeys((*whole.after, *parts.after))
        differ = [name for name in names if not alike(whole.after.get(name), parts.after.get(name), tolerance)]
        if odd := [name for name in differ if name in saved]:
            raise MisconfigurationException(_state_reason(odd[0], layers))
        if new := [name for name in differ if name not in self._warned]:
            self._warned.update(new)
            rank_zero_warn(
                f"`training_step` changes {', '.join(f'`{name}`' for name in new)} of the module per micro-batch: "
                "not what the whole batch would make of it. Gradients don't depend on it, so that training is exact; "
                "whatever else reads it finds a value per micro-batch. Change it in `on_train_batch_end`, which is "
                "called once per batch."
            )

    def _judge_logs(self, whole: Pass, parts: Pass, sizes: list[int], weights: list[float], turn: int) -> None:
        """Name in a warning what is logged or computed by metric objects and is not that of the whole."""
        tolerance = tolerance_of(self._loop.module, whole, parts).state
        names = differing(whole.logs, parts.logs, list(zip(weights, sizes, strict=True)), tolerance)
        for name, value in whole.metrics.items() if not turn else ():
            if name in parts.metrics and not alike(value, parts.metrics[name], max(tolerance, 1e-5)):
                names.append(name)
        if new := [name for name in dict.fromkeys(names) if name not in self._warned]:
            self._warned.update(new)
            rank_zero_warn(
                "With micro-batches some logged values will not be those of the whole batch; training is not affected: "
                f"{', '.join(map(repr, new))}. Values are means over the micro-batches, and metric objects logged with "
                "`on_step=True` have the value of the last one. For exact values log torchmetrics objects for the "
                "epoch, which see every sample, pass `MeanMetric` a `weight`, or name the reduction: "
                '`self.log(..., reduce_fx="sum")`.'
            )

    # --- words ------------------------------------------------------------------------------------------------------

    def _written_words(self) -> str:
        names = [
            f"`{name}`" for name in (*sorted(self._passes.changed_weights), *sorted(self._accumulation.written))[:3]
        ]
        return ", ".join(names) or "weights, or what an object holds that is no part of the module"

    def _reason(
        self, sizes: list[int], solution: tuple[float, float] | None, users: list[float] | None, turn: int
    ) -> str:
        head = (
            f"Micro-batches would give other weights than the whole batch: the gradient of {sum(sizes)} samples is not "
            f"the mean of those of {sizes[0]} and {sizes[1]} of them"
        )
        layers = [] if self._holds_statistics else batch_statistics(self._loop.module)
        later = f" This is so from the second step on: the first one changes {self._written_words()}." if turn else ""
        if solution is not None and users is not None:
            return (
                f"{head} weighted {users[0]:.4g} to {users[1]:.4g}, as `loss_weight` says, but {solution[0]:.4g} to "
                f"{solution[1]:.4g}.{later}"
            )
        if solution is not None:
            return (
                f"{head}: they count {solution[0]:.4g} and {solution[1]:.4g} times. What the loss is a mean over is "
                "nothing that the batch shows (samples, unmasked labels, masks, class weights). Return a mean over "
                "samples, or define `loss_weight(batch)`, the number that the loss of a batch is averaged over." + later
            )
        if layers:
            return f"{head}. {normalised(layers)}{later}"
        return (
            f"{head}, however they are weighted. Samples affect each other (contrastive losses, statistics of the "
            "batch, mixing, a random choice among them), the loss has several means that count different things, the "
            "module needs the longest sample of its batch, or the batch is cut in the wrong place. Define `split_batch("
            f"batch, sizes)` if the cut is wrong, return a mean over samples if there are several, {_ACCEPT}{later}"
        )


_ONE_AFTER_THE_OTHER = (
    "Micro-batches would give other weights than the whole batch: the gradients of {} and {} samples add up to that of "
    "all, but not where one runs after the other. The step runs a backward pass of its own or clears gradients, a hook "
    "on weights changes them, which are those of a micro-batch and not of the batch yet, or the step changes something "
    "that the next micro-batch sees: {}. Take gradients by `torch.autograd.grad`, change those of weights in "
    "`on_before_optimizer_step` and other things in `on_train_batch_end`, which are called once per batch, or keep the "
    "whole share in one micro-batch."
)


def _state_reason(name: str, layers: list[str]) -> str:
    if any(name.startswith(layer) for layer in layers):
        return normalised(layers)
    return (
        f"`training_step` changes `{name}` of the module, and what micro-batches make of it is not what the whole "
        f"batch makes of it. Change it in `on_train_batch_end`, which is called once per batch, {_ACCEPT}"
    )


# --- comparing gradients ----------------------------------------------------------------------------------------------


def _share(part: list[float], whole: list[float]) -> float:
    return sum(part) / sum(whole) if sum(whole) else 0.0


def _least(count: int, size: int) -> int:
    """Return the fewest samples of a part: one only if micro-batches have one."""
    return 2 if count >= 4 and size > 1 else 1


def _firsts(num_samples: int, count: int, size: int, first: int) -> list[int]:
    """Return where samples are cut in each turn, unequally; the first cut may be given."""
    least = _least(count, size)
    usual = min(size, count - 1) if count == num_samples else max(least, count // 3)
    usual = max(1, usual - (2 * usual == count > 2))
    last = count - max(least, count // 4)
    second = next(one for one in (last, usual, count - usual, first, usual) if one != (first or usual) or count == 2)
    return [first or usual, max(1, second)]


def _distance(whole: Pass, mixed: Tensor, tolerance: Tolerance) -> float:
    """Return how far projections are from those of the whole, in tolerances.

    Numbers that are not finite are infinitely far from any.
    """
    norms = torch.maximum(whole.sketch.norm(dim=1), mixed.norm(dim=1))
    gradients = torch.cat([norms[:-1].square().sum().sqrt().expand(len(norms) - 1), norms[-1:]])
    allowed = tolerance.relative * norms + tolerance.floor * gradients + 1e-300
    distance = float(((mixed - whole.sketch).norm(dim=1) / allowed).max())
    return distance if distance == distance else float("inf")


def _solve(whole: Pass, alone: list[Pass], tolerance: Tolerance) -> tuple[float, float] | None:
    """Return the weights by which the parts give the whole; None if no weights do."""
    columns = torch.stack([one.sketch.flatten() for one in alone], dim=1)
    if not bool(torch.isfinite(columns).all() and torch.isfinite(whole.sketch).all()):
        return None
    a, b = torch.linalg.lstsq(columns, whole.sketch.reshape(-1, 1)).solution.flatten().tolist()
    mixed = a * alone[0].sketch + b * alone[1].sketch
    return (a, b) if _distance(whole, mixed, tolerance) <= 1.0 else None
