"""Branch and bound over settings: the fastest that fits, proved against all others without tracing most of them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

from lightning_memfit.estimate.estimate import predict_peak_bytes, predict_total_bytes
from lightning_memfit.planner.candidates import Rejected, candidates
from lightning_memfit.planner.cost import PassWork, step_seconds
from lightning_memfit.planner.optimist import Optimist
from lightning_memfit.planner.solve import TIE, Solution, Solver, complexity_of, is_better, key_of
from lightning_memfit.planner.traces import Laboratory
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.setting import Setting


@dataclass
class Outcome:
    """What a search found, and what it passed over."""

    best: Solution | None = None
    solutions: list[Solution] = field(default_factory=list)
    """The best of every combination that was worked out, fastest first."""
    rejected: list[Rejected] = field(default_factory=list)
    num_candidates: int = 0
    num_traces: int = 0


_UNSURE = 0.05
"""What the times of several devices may be wrong against each other: they rest on data sheets, not on measurements."""


class Search(Solver):
    """Search for the fastest setting of a workload that fits.

    Combinations are visited in the order of a bound on their time (products alone, no recomputation) and, where that is
    equal, of their names; one whose bound is no better than the best found is never traced. The result depends on
    neither the order of the registry nor on what is cached.

    Args:
        laboratory: Makes the traces.
    """

    def __init__(self, laboratory: Laboratory) -> None:
        super().__init__(laboratory)
        self._optimist = Optimist(self)

    def run(self) -> Outcome:
        """Visit combinations until no other can be faster."""
        settings, refused = candidates(self.workload)
        outcome = Outcome(rejected=refused, num_candidates=len(settings) + len(refused))
        waiting = [
            (self.bounds.seconds(setting), key_of(setting), False, setting)
            for setting in self._within(settings, outcome)
        ]
        heapq.heapify(waiting)
        while waiting:
            bound, key, traced, setting = heapq.heappop(waiting)
            if outcome.best is not None and bound > outcome.best.time.total * (1 + self._unsure):
                break
            try:
                if not traced:
                    heapq.heappush(waiting, (max(bound, self.traced_bound(setting)), key, True, setting))
                    continue
                self._take(self._hopeless(setting, settings, outcome.best) or self.solve(setting), outcome)
            except TraceError as error:
                outcome.rejected.append(Rejected(setting, str(error)))
        outcome.solutions.sort(key=lambda solution: (solution.time.total, key_of(solution.setting)))
        if self._unsure and outcome.solutions:
            within = outcome.solutions[0].time.total * (1 + self._unsure)
            outcome.best = min(
                (solution for solution in outcome.solutions if solution.time.total <= within),
                key=lambda solution: (complexity_of(solution.setting), solution.time.total),
            )
        outcome.num_traces = self.laboratory.num_traces
        return outcome

    @property
    def _unsure(self) -> float:
        """Share of each other's time within which strategies are alike, so that the simplest one is taken."""
        return _UNSURE if self.workload.devices.total > 1 else 0.0

    def _within(self, settings: list[Setting], outcome: Outcome) -> list[Setting]:
        """Settings whose weights, gradients and states may fit where they belong; the others are rejected."""
        kept = []
        for setting in settings:
            least = self.bounds.least_bytes(setting)
            refusal = self.bounds.refuse_early(setting)
            if least > self.bounds.usable_bytes:
                reason = self.bounds.over(least, "weights, gradients and states alone need")
                outcome.rejected.append(Rejected(setting, reason, least))
            elif refusal is not None:
                outcome.rejected.append(Rejected(setting, refusal, is_limit=True))
            else:
                kept.append(setting)
        return kept

    def _hopeless(self, setting: Setting, others: list[Setting], best: Solution | None) -> Rejected | None:
        """Why a combination can't be the best, by what is traced already; None where it may be."""
        if self._loses_to_chunked(setting, others):
            return Rejected(setting, "the chunked loss needs less memory and no more time")
        if best is None or (least := self._optimist.least(setting)) is None:
            return None
        if isinstance(least, Rejected):
            needed = least.needed_bytes
            return least if needed is None else replace(least, reason=self.bounds.over(needed, "needs at least"))
        slower = least.time.total / best.time.total - 1
        if slower > max(TIE, self._unsure):
            return Rejected(setting, f"at least {slower:.0%} slower", slower=slower)
        if not self._unsure and slower >= -TIE and complexity_of(setting) > complexity_of(best.setting):
            return Rejected(setting, "no faster, and no simpler", slower=slower)
        return None

    def _loses_to_chunked(self, setting: Setting, others: list[Setting]) -> bool:
        """Whether a whole loss loses to the chunked one, which needs neither more time nor more memory."""
        chunked = setting.choose("chunked_loss")
        if setting.of_kind("loss") is not None or chunked not in others:
            return False
        try:
            plain, less = self.laboratory.passes(setting, "none"), self.laboratory.passes(chunked, "none")
        except TraceError:
            return False
        size = plain.micro_batch_size
        saves = predict_peak_bytes(less, size) < predict_peak_bytes(plain, size)
        return saves and self.traced_bound(chunked) <= self.traced_bound(setting)

    @staticmethod
    def _take(found: Solution | Rejected, outcome: Outcome) -> None:
        if isinstance(found, Rejected):
            outcome.rejected.append(found)
            return
        outcome.solutions.append(found)
        if outcome.best is None or is_better(found, outcome.best):
            outcome.best = found

    def traced_bound(self, setting: Setting) -> float:
        """The same from a trace: what forward and backward take without recomputation, at the best micro-batch.

        Raises:
            TraceError: If the step can't be traced.
        """
        profile, cost = self.laboratory.passes(setting, "none"), self.bounds.cost(setting)
        dtype, share = self.bounds.dtype(setting, cost), self.workload.samples_on_each(setting.world_size)
        rates = self.bounds.rates(setting)
        return min(
            step_seconds(PassWork.of(profile, m), cost, self.plain, rates, dtype, share // m).total
            for m in self.workload.sizes(setting.world_size)
        )

    def verify(self, solution: Solution) -> int | None:
        """What a trace of a plan itself, every block of it, needs of the device.

        None where parts of it lie elsewhere, on other devices for instance, which no trace of one process shows.

        Raises:
            TraceError: If it can't be traced.
        """
        if solution.setting.sharding is not None or self.model(solution.setting).off_device().entries:
            return None
        profile = self.laboratory.exactly(solution.setting)
        size = profile.micro_batch_size
        return predict_total_bytes(profile, size, self.workload.target.runtime)
