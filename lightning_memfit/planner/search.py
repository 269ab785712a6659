"""Branch and bound over settings: the fastest that fits, proved against all others without tracing most of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lightning_memfit.checkpointing.knapsack import PlanFrontier
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.estimate.estimate import predict_peak_bytes, predict_total_bytes
from lightning_memfit.memory import Category, MemoryBreakdown, Tier, format_bytes
from lightning_memfit.planner.candidates import (
    Rejected,
    candidates,
    conflict_of_sizes,
    state_bytes,
)
from lightning_memfit.planner.cost import PassWork, StepTime, least_seconds, step_seconds
from lightning_memfit.planner.memory import MemoryModel
from lightning_memfit.planner.traces import Laboratory
from lightning_memfit.planner.workload import Workload
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.cost import Cost
from lightning_memfit.techniques.facts import Run
from lightning_memfit.techniques.setting import Setting

_DTYPES = {"bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-mixed": "float16", "16-true": "float16"}
_CORRECTIONS = 4
"""How often a checkpointing plan is made again for what its fragmentation takes."""

_RESERVE = 0.03
"""Share of a device left free beside its margin: what putting a plan together from several traces may get wrong."""

_TIE = 0.005
"""Settings within this share of each other's time are alike; the simpler one is taken, then that of less memory."""


_NO_CHOICES: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Solution:
    """A setting that fits, with what is predicted for it."""

    setting: Setting
    time: StepTime
    peak_bytes: int
    """Of live tensors, library workspaces included."""
    needed_bytes: int
    """Of the device: fragmentation and runtime context, too."""
    breakdown: MemoryBreakdown
    choices: tuple[Choice, ...] = ()
    """Of checkpointing, by block."""


@dataclass
class Outcome:
    """What a search found, and what it passed over."""

    best: Solution | None = None
    solutions: list[Solution] = field(default_factory=list)
    """The best of every combination that was worked out, fastest first."""
    rejected: list[Rejected] = field(default_factory=list)
    num_candidates: int = 0
    num_traces: int = 0


class Search:
    """Search for the fastest setting of a workload that fits.

    Combinations are visited in the order of a bound on their time (products alone, no recomputation) and, where that is
    equal, of their names; one whose bound is no better than the best found is never traced. The result depends on
    neither the order of the registry nor on what is cached.

    Args:
        laboratory: Makes the traces.
    """

    def __init__(self, laboratory: Laboratory) -> None:
        self.laboratory = laboratory
        self.workload: Workload = laboratory.workload
        self.plain: ModelProfile = laboratory.plain()
        self.withheld_bytes = 0
        """Of the device, for what a trace of an earlier plan needed beyond its prediction."""
        self._models: dict[Setting, MemoryModel] = {}

    def run(self) -> Outcome:
        """Visit combinations until no other can be faster."""
        settings, refused = candidates(self.workload)
        outcome = Outcome(rejected=refused, num_candidates=len(settings) + len(refused))
        waiting = [(self.bound(setting), _key(setting), False, setting) for setting in self._within(settings, outcome)]
        heapq.heapify(waiting)
        while waiting:
            bound, key, traced, setting = heapq.heappop(waiting)
            if outcome.best is not None and bound > outcome.best.time.total:
                break
            try:
                if not traced:
                    heapq.heappush(waiting, (max(bound, self.traced_bound(setting)), key, True, setting))
                    continue
                self._take(self._solve_unless_dominated(setting, settings), outcome)
            except TraceError as error:
                outcome.rejected.append(Rejected(setting, str(error)))
        outcome.solutions.sort(key=lambda solution: (solution.time.total, _key(solution.setting)))
        outcome.num_traces = self.laboratory.num_traces
        return outcome

    def _within(self, settings: list[Setting], outcome: Outcome) -> list[Setting]:
        """Settings whose weights, gradients and states may fit; the others are rejected."""
        kept = []
        for setting in settings:
            least = self.least_bytes(setting)
            if least <= self.usable_bytes:
                kept.append(setting)
            else:
                reason = self.over(least, "weights, gradients and states alone need")
                outcome.rejected.append(Rejected(setting, reason, least))
        return kept

    def _solve_unless_dominated(self, setting: Setting, others: list[Setting]) -> Solution | Rejected:
        """A whole loss loses to the chunked one without being traced further where that needs neither more time."""
        chunked = setting.choose("chunked_loss")
        if setting.of_kind("loss") is None and chunked in others:
            try:
                plain, less = self.laboratory.passes(setting, "none"), self.laboratory.passes(chunked, "none")
            except TraceError:
                return self.solve(setting)
            size = plain.micro_batch_size
            saves = predict_peak_bytes(less, size) < predict_peak_bytes(plain, size)
            if saves and self.traced_bound(chunked) <= self.traced_bound(setting):
                return Rejected(setting, "the chunked loss needs less memory and no more time")
        return self.solve(setting)

    @staticmethod
    def _take(found: Solution | Rejected, outcome: Outcome) -> None:
        if isinstance(found, Rejected):
            outcome.rejected.append(found)
            return
        outcome.solutions.append(found)
        if outcome.best is None or _better(found, outcome.best):
            outcome.best = found

    # --- bounds -----------------------------------------------------------------------------------------------------

    @property
    def usable_bytes(self) -> int:
        """What a run may use of the device."""
        usable = self.workload.target.usable_bytes
        if usable is None:
            raise ValueError(
                "There is no GPU here and none was named. Pass for example `--device 'RTX 3060'` or 12GiB."
            )
        return int(usable * (1 - _RESERVE)) - self.withheld_bytes

    def bound(self, setting: Setting) -> float:
        """Seconds per step that no plan of these techniques gets below."""
        flops = sum(self.plain.flops.get(phase, 0) for phase in ("forward", "backward")) / self.plain.micro_batch_size
        cost, workload = self._cost(setting), self.workload
        per_step = flops * workload.share
        return least_seconds(per_step, cost, self.plain, workload.rates, self._dtype(setting, cost), 1)

    def traced_bound(self, setting: Setting) -> float:
        """The same from a trace: what forward and backward take without recomputation, at the best micro-batch.

        Raises:
            TraceError: If the step can't be traced.
        """
        profile, cost = self.laboratory.passes(setting, "none"), self._cost(setting)
        dtype, share = self._dtype(setting, cost), self.workload.share
        return min(
            step_seconds(PassWork.of(profile, m), cost, self.plain, self.workload.rates, dtype, share // m).total
            for m in self.workload.sizes
        )

    def least_bytes(self, setting: Setting) -> int:
        """Bytes of the device that no plan of these techniques gets below."""
        itemsize = 2 if setting.precision.endswith("-true") and setting.precision != "32-true" else 4
        return state_bytes(setting, self.plain, itemsize) + self._overhead_bytes

    @property
    def _overhead_bytes(self) -> int:
        runtime = self.workload.target.runtime
        return runtime.context_bytes + runtime.allocated_bytes if runtime is not None else 0

    def over(self, needed_bytes: int, what: str = "needs") -> str:
        """`needs 13.1 GiB, 1.9 over`, in words."""
        excess = needed_bytes - self.usable_bytes
        return f"{what} {format_bytes(needed_bytes)}, {format_bytes(excess)} over"

    def verify(self, solution: Solution) -> int | None:
        """What a trace of a plan itself, every block of it, needs of the device; None where parts of it lie elsewhere.

        Raises:
            TraceError: If it can't be traced.
        """
        if self.model(solution.setting).off_device().entries:
            return None
        profile = self.laboratory.exactly(solution.setting)
        size = profile.micro_batch_size
        return predict_total_bytes(profile, size, self.workload.target.runtime)

    # --- one combination --------------------------------------------------------------------------------------------

    def solve(self, setting: Setting) -> Solution | Rejected:
        """The fastest micro-batch and checkpointing plan of a combination of techniques.

        Raises:
            TraceError: If its step can't be traced.
        """
        refusal = self._refuse_off_device(setting)
        if refusal is not None:
            return refusal
        best: Solution | None = None
        least: int | None = None
        reason = ""
        for sized in self._sized(setting):
            conflict = conflict_of_sizes(sized, self._run_of(sized), self.workload.loader_batch)
            if conflict is not None:
                reason = reason or conflict
                continue
            found = self.at_size(sized)
            if isinstance(found, int):
                least = found if least is None else min(least, found)
                break  # larger micro-batches need more
            if best is None or _better(found, best):
                best = found
        if best is not None:
            return best
        if least is not None:
            return Rejected(setting, self.over(least, "needs"), least)
        return Rejected(setting, reason)

    def at_size(self, setting: Setting) -> Solution | int:
        """The fastest plan of a setting at its micro-batch; what it needs at least where none fits."""
        assert setting.micro_batch_size is not None
        size, model = setting.micro_batch_size, self.model(setting)
        overhead = self._overhead_at(size)
        frontier = model.frontier(size, self.workload.rates)
        if frontier is None:
            peak = model.peak_bytes(size)
            needed = peak + overhead + model.fragmentation_bytes((), size)
            return self._solution(setting, (), peak, needed) if needed <= self.usable_bytes else needed
        budget = self.usable_bytes - overhead
        smallest = frontier.minimum_bytes + overhead
        for _ in range(_CORRECTIONS):
            if budget < frontier.minimum_bytes:
                return max(smallest, self._least_needed(model, frontier, size))
            plan = frontier.plan_for(budget)
            taken = model.fragmentation_bytes(plan.choices, size)
            needed = plan.peak_bytes + taken + overhead
            if needed <= self.usable_bytes:
                return self._solution(setting, plan.choices, plan.peak_bytes, needed)
            budget = min(budget, plan.peak_bytes) - (needed - self.usable_bytes)
        return self._least_needed(model, frontier, size)

    def uniformly(self, setting: Setting) -> Solution:
        """What is predicted for a complete setting whose blocks are all checkpointed alike, whether it fits or not.

        Raises:
            TraceError: If its step can't be traced.
            ValueError: If its blocks are not checkpointed alike.
        """
        assert setting.micro_batch_size is not None
        size, model = setting.micro_batch_size, self.model(setting)
        choice = setting.of_kind("checkpointing")
        if choice is not None and "choices" in choice.options:
            raise ValueError("`choices` differ from block to block. Give `mode`, or leave checkpointing out.")
        wanted: Choice = "none"
        if choice is not None:
            wanted = "keep_matmul_attention" if choice.options.get("mode") == "selective" else "full"
        frontier = model.frontier(size, self.workload.rates)
        peak, choices = model.peak_bytes(size), _NO_CHOICES
        if frontier is not None:
            choices = (wanted,) * len(frontier.problem.blocks)
            peak = frontier.problem.peak_bytes(choices)
        needed = peak + self._overhead_at(size) + model.fragmentation_bytes(choices, size)
        return self._solution(setting, choices, peak, needed)

    def model(self, setting: Setting) -> MemoryModel:
        """Memory of a setting's techniques, traced once."""
        alone = Setting(chosen=setting.chosen).without("checkpointing")
        if alone not in self._models:
            self._models[alone] = MemoryModel(self.laboratory, alone, self._dtype(alone, self._cost(alone)))
        return self._models[alone]

    def _least_needed(self, model: MemoryModel, frontier: PlanFrontier, size: int) -> int:
        plan = frontier.plan_for(frontier.minimum_bytes)
        return plan.peak_bytes + model.fragmentation_bytes(plan.choices, size) + self._overhead_at(size)

    def _overhead_at(self, size: int) -> int:
        """What a micro-batch finds on the device beside what a trace of it shows."""
        return self._overhead_bytes + self.workload.waiting_bytes(size)

    def _solution(self, setting: Setting, choices: tuple[Choice, ...], peak_bytes: int, needed_bytes: int) -> Solution:
        model, size = self.model(setting), setting.micro_batch_size
        assert size is not None
        cost = self._cost(setting)
        time = step_seconds(
            model.work(size, choices),
            cost,
            self.plain,
            self.workload.rates,
            self._dtype(setting, cost),
            setting.accumulate_grad_batches,
        )
        runtime = self.workload.target.runtime
        workspace = runtime.allocated_bytes if runtime is not None else 0
        context = runtime.context_bytes if runtime is not None else 0
        waiting = self.workload.waiting_bytes(size)
        around = {
            Category.TEMPORARY: workspace,
            Category.FRAGMENTATION: needed_bytes - peak_bytes - workspace - context - waiting,
            Category.RUNTIME_CONTEXT: context,
            Category.INPUT: waiting,
        }
        return Solution(
            _with_checkpointing(setting, choices),
            time,
            peak_bytes + workspace + waiting,
            needed_bytes,
            model.breakdown(peak_bytes, size) + model.off_device() + MemoryBreakdown.device(around),
            choices,
        )

    def _sized(self, setting: Setting) -> Iterator[Setting]:
        """The setting at every micro-batch that divides the step; only the traced one where no other is known."""
        share = self.workload.share
        sizes: tuple[int, ...] = self.workload.sizes
        model = self.model(setting)
        if not model.knows_every_size:
            sizes = tuple(size for size in sizes if size == model.none.micro_batch_size)
        for size in sizes:
            yield replace(setting, micro_batch_size=size, accumulate_grad_batches=share // size)

    def _refuse_off_device(self, setting: Setting) -> Rejected | None:
        host = self.workload.limits.host_bytes
        if host is None:
            return None
        off = self.model(setting).off_device()
        needed = off.total(Tier.HOST) + off.total(Tier.PINNED_HOST)
        if needed <= host:
            return None
        return Rejected(
            setting,
            f"needs {format_bytes(needed)} of host memory, {format_bytes(needed - host)} over the {format_bytes(host)} "
            "there are",
        )

    def _run_of(self, setting: Setting) -> Run:
        run = replace(setting, accumulate_grad_batches=1, micro_batch_size=None).run(self.workload.facts)
        return replace(run, accumulate_grad_batches=setting.accumulate_grad_batches)

    def _cost(self, setting: Setting) -> Cost:
        """Of all techniques but checkpointing, per micro-batch of one sample where it grows with the batch."""
        return Setting(chosen=setting.chosen).without("checkpointing").cost(self.plain)

    def _dtype(self, setting: Setting, cost: Cost) -> str:
        return _DTYPES.get(setting.precision) or cost.matmul_rate or "float32"


def _better(one: Solution, other: Solution) -> bool:
    """Clearly faster; or as fast, and simpler, or needing less."""
    if one.time.total < other.time.total * (1 - _TIE):
        return True
    if one.time.total > other.time.total * (1 + _TIE):
        return False
    return _rank(one) < _rank(other)


def _rank(solution: Solution) -> tuple[int, int, float, tuple[str, ...]]:
    checkpointed = sum(choice != "none" for choice in solution.choices)
    return len(solution.setting.chosen), checkpointed, solution.time.total, _key(solution.setting)


def _key(setting: Setting) -> tuple[str, ...]:
    return (str(len(setting.chosen)), *(f"{choice.name}{sorted(choice.options.items())}" for choice in setting.chosen))


def _with_checkpointing(setting: Setting, choices: tuple[Choice, ...]) -> Setting:
    """The setting with a checkpointing plan, as short as it can be said."""
    plain = setting.without("checkpointing")
    kinds = set(choices)
    if kinds <= {"none"}:
        return plain
    if kinds == {"full"}:
        return plain.choose("activation_checkpointing")
    if kinds == {"keep_matmul_attention"}:
        return plain.choose("activation_checkpointing", mode="selective", keep=["matmul", "attention"])
    return plain.choose("activation_checkpointing", choices=list(choices))
