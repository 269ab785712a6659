"""`make_plan`: search, then say why: what every technique bought, what was rejected, what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_memfit.device.catalogue import DEVICES
from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.memory import format_bytes
from lightning_memfit.planner.calibration import uncorrected
from lightning_memfit.planner.candidates import Rejected, candidates, missing_permissions
from lightning_memfit.planner.plan import Alternative, Bought, Plan, label
from lightning_memfit.planner.search import Outcome, Search, Solution
from lightning_memfit.planner.traces import Laboratory
from lightning_memfit.planner.workload import NUMERICS, Workload
from lightning_memfit.profile.build import sequence_length
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.techniques.setting import Setting

_NUM_ALTERNATIVES = 6
_MAX_MICRO_BATCH = 1 << 12


def make_plan(
    workload: Workload,
    cache: ProfileCache | None = None,
    overlap: bool = False,
    verify: bool = False,
    withheld_bytes: int = 0,
) -> Plan:
    """Find the fastest setting of a workload that fits.

    Args:
        workload: What is trained, where, within which limits.
        cache: Where traces are kept between runs; none by default.
        overlap: Trace two sizes at a time, in a fork; for commands only.
        verify: Trace the plan itself, too, and plan again if it needs more than the device has.
        withheld_bytes: Of the device, for what a run of an earlier plan needed beyond its prediction.

    Raises:
        TraceError: If the plain step can't be traced, so that nothing can be said.
        ValueError: If there is no device to plan for.
    """
    search = Search(Laboratory(workload, cache, overlap))
    search.bounds.withheld_bytes = withheld_bytes
    outcome, verified = _verified(search) if verify else (search.run(), None)
    searched = {
        "combinations": outcome.num_candidates,
        "worked_out": len(outcome.solutions),
        "traces": search.laboratory.num_traces,
    }
    plan = Plan(
        model=type(workload.module).__name__,
        num_parameters=search.plain.num_parameters,
        batch_size=workload.share,
        sequence_length=sequence_length(workload.batch),
        device=workload.target.name,
        devices=workload.devices.total,
        usable_bytes=search.bounds.usable_bytes,
        setting=None,
        alternatives=tuple(_alternatives(outcome)),
        notes=tuple(f"Assumed: {assumption}." for assumption in search.plain.assumptions),
        searched=searched,
    )
    best = outcome.best
    if best is None:
        return replace(plan, advice=tuple(_advice(search, outcome)))
    return replace(
        plan,
        setting=best.setting,
        peak_bytes=best.peak_bytes,
        needed_bytes=best.needed_bytes,
        breakdown=best.breakdown,
        written_bytes=search.bounds.written_bytes(best.setting),
        seconds=dict(best.time.seconds),
        verified_bytes=verified,
        uncorrected=uncorrected(best.time.seconds, workload.rates),
        rates=workload.rates.name,
        bought=tuple(_bought(search, best)),
        largest_micro_batch=largest_micro_batch(search, best.setting),
    )


def _verified(search: Search) -> tuple[Outcome, int | None]:
    """Search until a trace of the plan itself fits; every time with that much less for it."""
    capacity = search.workload.target.usable_bytes or 0
    while True:
        outcome = search.run()
        needed = search.verify(outcome.best) if outcome.best is not None else None
        if needed is None or needed <= capacity:
            return outcome, needed
        search.bounds.withheld_bytes += needed - capacity  # at some point nothing is left, and nothing fits


def largest_micro_batch(search: Search, setting: Setting) -> int:
    """Largest micro-batch that would still fit with the same techniques, checkpointing as needed."""
    alone = replace(setting, accumulate_grad_batches=1).without("checkpointing")
    assert setting.micro_batch_size is not None
    if not search.model(alone).knows_every_size:
        return setting.micro_batch_size

    def fits(size: int) -> bool:
        return not isinstance(search.at_size(replace(alone, micro_batch_size=size)), int)

    low, high = setting.micro_batch_size, setting.micro_batch_size
    while high < _MAX_MICRO_BATCH and fits(2 * high):
        low, high = 2 * high, 2 * high
    high = min(2 * high, _MAX_MICRO_BATCH)
    while high - low > max(1, low // 16):  # to about 6 %
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _bought(search: Search, best: Solution) -> Iterator[Bought]:
    """Each technique against the plan without it: by closed form, and from traces for loss and checkpointing."""
    setting, size = best.setting, best.setting.micro_batch_size
    assert size is not None
    model, rates = search.model(setting), search.workload.rates
    for choice in setting.chosen:
        kind = choice.technique.kind
        without = setting.without(kind)
        if kind == "strategy":
            without = replace(without, world_size=1)  # one device that holds everything
        if kind == "checkpointing":
            saved = model.peak_bytes(size) - best.peak_bytes
            frontier = model.frontier(size, rates)
            extra = frontier.problem.seconds(best.choices) if frontier is not None else 0.0
            yield Bought(choice.name, saved, extra * setting.accumulate_grad_batches)
            continue
        seconds = search.bounds.seconds(setting) - search.bounds.seconds(without)
        if kind == "loss":
            plain, less = (search.laboratory.passes(s, "none") for s in (without, setting))
            saved = predict_peak_bytes(plain, size) - predict_peak_bytes(less, size)
        else:
            saved = search.bounds.least_bytes(without) - search.bounds.least_bytes(setting)
        yield Bought(choice.name, saved, seconds)


def _alternatives(outcome: Outcome) -> Iterator[Alternative]:
    """The next best ones: slower first, then those that need least too much, then refusals; each reason once."""
    slower = sorted(_slower(outcome), key=lambda item: item[0])[: _NUM_ALTERNATIVES // 2]
    yield from (alternative for _, alternative in slower)
    shown = len(slower)
    too_large = sorted(
        (r for r in outcome.rejected if r.needed_bytes is not None),
        key=lambda r: (r.needed_bytes or 0, label(r.setting)),
    )
    for rejected in too_large:
        if shown < _NUM_ALTERNATIVES:
            yield Alternative(label(rejected.setting), rejected.reason)
            shown += 1
    reasons: set[str] = set()
    for rejected in sorted(outcome.rejected, key=lambda r: not r.is_limit):  # what a larger machine would change
        if rejected.needed_bytes is not None or rejected.slower is not None:
            continue
        if rejected.reason not in reasons and len(reasons) < _NUM_ALTERNATIVES // 2:
            reasons.add(rejected.reason)
            yield Alternative(label(rejected.setting), rejected.reason)


def _slower(outcome: Outcome) -> Iterator[tuple[float, Alternative]]:
    """Those that would fit, by the share of the best one's time that they take longer."""
    best = outcome.best
    for solution in outcome.solutions:
        if best is not None and solution is not best:
            slower = solution.time.total / best.time.total - 1
            reason = f"{slower:.0%} slower" if slower >= 0.005 else "no faster, and no simpler"
            needs = f"{reason}, needs {format_bytes(solution.needed_bytes)}"
            yield slower, Alternative(label(solution.setting), needs)
    for rejected in outcome.rejected:
        if rejected.slower is not None:
            yield rejected.slower, Alternative(label(rejected.setting), rejected.reason)


def _advice(search: Search, outcome: Outcome) -> Iterator[str]:
    """What would make it fit."""
    least = next(iter(_needs(outcome.rejected)), None)
    if least is not None:
        needed, setting = least
        usable = format_bytes(search.bounds.usable_bytes)
        yield f"the least is {label(setting)}, which needs {format_bytes(needed)} where {usable} are usable."
        device = smallest_device(needed)
        if device is not None:
            yield f"A {device} would do."
    allowed = _with_everything_allowed(search)
    if allowed:
        yield f"More may be allowed: {', '.join(allowed)} (`--allow`)."
    length = sequence_length(search.workload.batch)
    if length is not None and length > 1 and least is not None:
        yield f"Shorter sequences than {length} tokens need less for activations."
    host = search.workload.limits.host_bytes
    limited = [r.reason for r in outcome.rejected if r.is_limit]
    if host is not None and any("of host memory" in reason for reason in limited):
        yield f"More host memory than {format_bytes(host)} would allow offloading."
    pinned = search.workload.limits.pinned_bytes
    if pinned is not None and any("of page-locked" in reason for reason in limited):
        yield f"More page-locked memory than {format_bytes(pinned)} would allow offloading (`--pinned-memory`)."
    on_disk = next((reason for reason in limited if "disk" in reason), None)
    if on_disk is not None:
        yield f"From disk it {on_disk}."


def _needs(rejected: list[Rejected]) -> list[tuple[int, Setting]]:
    """Bytes and setting of those that need too much, the least first."""
    found = [(r.needed_bytes, label(r.setting), r.setting) for r in rejected if r.needed_bytes is not None]
    return [(needed, setting) for needed, _, setting in sorted(found, key=lambda item: item[:2])]


def smallest_device(needed_bytes: int) -> str | None:
    """The smallest device of the catalogue that has as much to give; None where none has."""
    fitting = [spec for spec in DEVICES if spec.memory_bytes - safety_margin_bytes(spec.memory_bytes) >= needed_bytes]
    return min(fitting, key=lambda spec: (spec.memory_bytes, spec.name)).name if fitting else None


def _with_everything_allowed(search: Search) -> list[str]:
    """Classes of numerics that would admit combinations whose states fit."""
    workload = search.workload
    free = replace(workload, allow=frozenset(NUMERICS))
    kept, _ = candidates(free)
    fitting = [setting for setting in kept if search.bounds.least_bytes(setting) <= search.bounds.usable_bytes]
    needed = {name for technique, names in missing_permissions(workload) for name in names
              if any(technique in setting.techniques() for setting in fitting)}  # fmt: skip
    return sorted(needed)
