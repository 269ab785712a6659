"""`make_plan`: search for the fastest setting of a workload that fits, and make a `Plan` of what was found.

A plan says what every technique contributes, what was passed over and why, what it compares with, and what would help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.planner.advice import advice_of
from lightning_memfit.planner.candidates import Rejected, by_need
from lightning_memfit.planner.plan import Alternative, Plan, TechniqueEffect, label
from lightning_memfit.planner.rates import uncorrected
from lightning_memfit.planner.rows import rows_of
from lightning_memfit.planner.search import Outcome, Progress, Search, unseen
from lightning_memfit.planner.solve import Solution
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload
from lightning_memfit.profile.build import sequence_length
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.record import ModelProfile

_NUM_ALTERNATIVES = 3


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
    plan = Plan(
        model=type(workload.module).__name__,
        num_parameters=search.plain.num_parameters,
        batch_size=workload.samples_per_step,
        sequence_length=sequence_length(workload.batch),
        device=workload.target.name,
        devices=workload.devices.total,
        usable_bytes=search.solver.budget.usable_bytes,
        setting=None,
        alternatives=tuple(_alternatives(outcome)),
        notes=(*_limits_of(search.plain), *(f"Assumed: {assumption}." for assumption in search.plain.assumptions)),
        rows=tuple(rows_of(search, outcome)) if compare else (),
        optimizer=search.plain.optimizer,
    )
    best = outcome.best
    if best is None:
        plan = replace(plan, advice=tuple(advice_of(search, outcome)))
    else:
        shown = search.figures(best)
        # The figures of a plan under a strategy are those that `memfit estimate` gives for it, and so is its limit.
        usable = plan.usable_bytes if shown is best else workload.target.usable_bytes or 0
        plan = replace(as_plan(search, plan, shown), usable_bytes=usable, bought=tuple(_effects(search, best)))
    if observe is not None:
        observe(search, outcome, plan)
    return plan


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


def _alternatives(outcome: Outcome) -> Iterator[Alternative]:
    """Settings that need too much, the one that needs least first, and what rules refuse; each reason once."""
    for rejected in by_need(outcome.rejected)[:_NUM_ALTERNATIVES]:
        yield Alternative(label(rejected.setting), rejected.reason)
    # Settings that a larger machine would make possible come first.
    refused = [one for one in outcome.rejected if one.needed_bytes is None and one.seconds is None]
    by_reason: dict[str, Rejected] = {}
    for rejected in sorted(refused, key=lambda one: not one.resource_limited):
        by_reason.setdefault(rejected.reason, rejected)
    for rejected in list(by_reason.values())[:_NUM_ALTERNATIVES]:
        yield Alternative(label(rejected.setting), rejected.reason)
