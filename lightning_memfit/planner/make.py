"""`make_plan`: search for the fastest setting of a workload that fits, and make a `Plan` of what was found.

A plan says what every technique contributes, what was passed over and why, what it compares with, and what would help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.memory import format_bytes
from lightning_memfit.planner.advice import advice_of
from lightning_memfit.planner.candidates import by_need
from lightning_memfit.planner.plan import Alternative, Plan, TechniqueEffect, label
from lightning_memfit.planner.rows import rows_of
from lightning_memfit.planner.search import Outcome, Progress, Search, unseen
from lightning_memfit.planner.solve import Solution
from lightning_memfit.planner.time import uncorrected
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload
from lightning_memfit.profile.build import sequence_length
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.record import ModelProfile

_NUM_ALTERNATIVES = 6


def make_plan(
    workload: Workload,
    cache: ProfileCache | None = None,
    compare: bool = False,
    progress: Progress = unseen,
    observe: Callable[[Search, Outcome, Plan], object] | None = None,
) -> Plan:
    """Find the fastest setting of a workload that fits.

    Args:
        workload: What is trained, where, within which limits.
        cache: Where traces are kept between runs; none by default.
        compare: Compare the plan with the recipe as it is, the best exact and the best allowed one.
        progress: Is told how far the search is.
        observe: Is given the search, what it found and the plan made of it.

    Raises:
        TraceError: If the plain step can't be traced.
        ValueError: If there is no device to plan for.
    """
    search = Search(TraceStore(workload, cache), progress)
    outcome = _searched(search)
    searched = {
        "combinations": outcome.num_candidates,
        "worked_out": len(outcome.solutions),
        "traces": search.store.num_traces,
    }
    plan = Plan(
        model=type(workload.module).__name__,
        num_parameters=search.plain.num_parameters,
        batch_size=workload.samples_per_step,
        sequence_length=sequence_length(workload.batch),
        device=workload.target.name,
        devices=workload.devices.total,
        usable_bytes=search.solver.budget.usable_bytes,
        setting=None,
        alternatives=tuple(_alternatives(search, outcome)),
        notes=(*_limits_of(search.plain), *(f"Assumed: {assumption}." for assumption in search.plain.assumptions)),
        rows=tuple(rows_of(search, outcome)) if compare else (),
        optimizer=search.plain.optimizer,
        searched=searched,
    )
    best = outcome.best
    if best is None:
        plan = replace(plan, advice=tuple(advice_of(search, outcome)))
    else:
        plan = _with_figures(search, plan, best)
    if observe is not None:
        observe(search, outcome, plan)
    return plan


def _with_figures(search: Search, plan: Plan, best: Solution) -> Plan:
    """Complete a plan for the setting that was chosen."""
    workload, shown = search.workload, search.figures(best)
    # The figures of a plan under a strategy are those that `memfit estimate` gives for it, and so is its limit.
    is_estimate = shown is not best
    return replace(
        as_plan(search, plan, best),
        usable_bytes=(workload.target.usable_bytes or 0) if is_estimate else plan.usable_bytes,
        peak_bytes=shown.peak_bytes,
        needed_bytes=shown.needed_bytes,
        breakdown=shown.breakdown,
        bought=tuple(_effects(search, best)),
    )


def as_plan(search: Search, plan: Plan, solution: Solution) -> Plan:
    """Return a plan with the setting of a solution and its figures in place of its own."""
    return replace(
        plan,
        usable_bytes=search.solver.budget.usable_bytes,
        setting=solution.setting,
        peak_bytes=solution.peak_bytes,
        needed_bytes=solution.needed_bytes,
        breakdown=solution.breakdown,
        written_bytes=search.solver.time.written_bytes(solution.setting),
        seconds=dict(solution.time.seconds),
        uncorrected=uncorrected(solution.time.seconds, search.workload.rates),
        rates=search.workload.rates.name,
        changes=search.solver.numerics.changes(solution.setting),
    )


def _limits_of(plain: ModelProfile) -> Iterator[str]:
    """What the plain step's trace keeps a plan from considering."""
    if not plain.knows_every_size:
        size, reason = plain.micro_batch_size, plain.only_this_size
        yield f"Only micro-batch {size} was considered: at others, memory can't be told from the trace ({reason})."


def _searched(search: Search) -> Outcome:
    """Search until a trace of the plan itself fits, each time with less of the device for its strategy."""
    capacity = search.workload.target.usable_bytes or 0
    while True:
        outcome = search.run()
        strategy = None if outcome.best is None else outcome.best.setting.of_kind("strategy")
        if outcome.best is None or strategy is None:
            return outcome
        found = search.verify(outcome.best)
        if found is None or found.needed_bytes <= capacity:
            return outcome
        # At some point nothing is left of it, and another one or nothing fits.
        search.solver.budget.withheld[strategy.name] += found.needed_bytes - capacity


def _effects(search: Search, best: Solution) -> Iterator[TechniqueEffect]:
    """Compare the plan with the one without each technique: by traces for loss and checkpointing, else closed form.

    Adapters of the recipe's own are none of the plan's, and every figure has them.
    """
    setting, size = best.setting, best.setting.micro_batch_size
    assert size is not None
    model = search.solver.models.of(setting)
    for choice in setting.chosen:
        if choice == search.workload.adapter:
            continue
        kind = choice.technique.kind
        without = setting.without(kind)
        if kind == "strategy":
            without = replace(without, world_size=1)  # one device that holds everything
        if kind == "checkpointing":
            saved = model.peak_bytes(size) - best.peak_bytes
            frontier = model.frontier(size)
            extra = frontier.problem.seconds(best.choices) if frontier is not None else 0.0
            yield TechniqueEffect(choice.name, saved, extra * setting.accumulate_grad_batches)
            continue
        seconds = search.bound.seconds(setting) - search.bound.seconds(without)
        if kind == "loss":
            plain, less = (search.store.passes(s, "none") for s in (without, setting))
            saved = predict_peak_bytes(plain, size) - predict_peak_bytes(less, size)
        else:
            saved = search.bound.least_bytes(without) - search.bound.least_bytes(setting)
        yield TechniqueEffect(choice.name, saved, seconds)


def _alternatives(search: Search, outcome: Outcome) -> Iterator[Alternative]:
    """The next best settings: slower ones first, then those that need too much, then refusals; each reason once."""
    slower = sorted(_slower(search, outcome), key=lambda item: item[0])[: _NUM_ALTERNATIVES // 2]
    yield from (alternative for _, alternative in slower)
    shown = len(slower)
    for rejected in by_need(outcome.rejected):
        if shown < _NUM_ALTERNATIVES:
            yield Alternative(label(rejected.setting), rejected.reason)
            shown += 1
    reasons: set[str] = set()
    # Settings that a larger machine would make possible come first.
    for rejected in sorted(outcome.rejected, key=lambda r: not r.resource_limited):
        if rejected.needed_bytes is not None or rejected.seconds is not None:
            continue
        if rejected.reason not in reasons and len(reasons) < _NUM_ALTERNATIVES // 2:
            reasons.add(rejected.reason)
            yield Alternative(label(rejected.setting), rejected.reason)


def _slower(search: Search, outcome: Outcome) -> Iterator[tuple[float, Alternative]]:
    """Settings that would fit, with the share of the best one's time that they take longer, at least."""
    best = outcome.best
    if best is None:
        return
    others = [(one.setting, one.time.total, "") for one in outcome.solutions if one is not best]
    others += [(one.setting, one.seconds, "at least ") for one in outcome.rejected if one.seconds is not None]
    needs = {one.setting: f", needs {format_bytes(search.figures(one).needed_bytes)}" for one in outcome.solutions}
    for setting, seconds, least in others:
        slower = seconds / best.time.total - 1
        if slower >= 0.005:
            reason = f"{least}{slower:.0%} slower"
        elif search.solver.numerics.severity(setting) <= best.severity:
            reason = "no faster, and no simpler"
        else:
            faster = f"{'at most ' if least else ''}{-slower:.0%} faster" if slower <= -0.005 else "no faster"
            reason = f"{faster}, and changes more of the recipe's numbers"
        yield slower, Alternative(label(setting), reason + needs.get(setting, ""))
