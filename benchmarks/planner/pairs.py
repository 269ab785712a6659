"""How good plans are: pairs of a small model and a memory limit on the simulated device (CPU, one thread).

The CPU is measured first, as `memfit doctor --measure` does; no step of these models is known to the planner. For every
model a grid of settings (optimizer x checkpointing of its repeated blocks x micro-batch, gradient release where a step
is one pass) is measured without a limit: peak of live bytes and time of an optimizer step, the median of five. For each
limit a plan is made and run under `MemoryLimit`, at once and only once. Its time is held against the best of the grid
that stays within the limit: the plan, the two fastest of those and the fastest one that keeps the recipe's numbers are
measured again in turns, so that what else the machine does meanwhile slows all alike. Times are processor time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.planner.models import MODELS, SHARE
from benchmarks.runner import Benchmark, Named, Options, Row, Stage
from benchmarks.training import Clock, Repeated, trainer_of
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.estimate.target import host_target
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.measured import measure
from lightning_memfit.planner.plan import label
from lightning_memfit.planner.rates import CalibrationFile, Rates, calibrated, cpu_name, cpu_rates
from lightning_memfit.planner.solve import Solver
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import TOLERANCE, Workload, check_allow, facts_of
from lightning_memfit.profile.build import resize_batch
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting

RESULT = "planner_pairs.json"
ALLOW = ("exact", "8bit")
SIZES = (1, 4, 16)
LIMITS = (0.4, 0.46, 0.53, 0.6, 0.68, 0.78, 0.9, 1.05)
"""As shares of the peak that the plain setting has."""
_UNLIMITED = 1 << 34
_STEPS, _SKIPPED = 7, 2
_FINALISTS, _ROUNDS, _MOST_ROUNDS = 2, 2, 6
_CLOSE = 0.05
"""A plan that seems slower than the best by more than this is measured in more rounds: noise looks the same."""

Make = Callable[[], tuple[pl.LightningModule, Any]]


def seconds_of(make: Make, setting: Setting) -> list[float]:
    """Of the optimizer steps of a run without a limit, the first ones left out."""
    clock = Clock()
    _run(make, setting, _STEPS, clock)
    return clock.seconds[_SKIPPED:]


def peak_of(make: Make, setting: Setting, limit_bytes: int = _UNLIMITED) -> int | None:
    """Peak of live bytes in two steps; None where they run out of memory."""
    limit = MemoryLimit(limit_bytes)
    try:
        _run(make, setting, 2, limit)
    except torch.OutOfMemoryError:
        return None
    assert limit.ledger is not None
    return limit.ledger.peak_bytes


def _run(make: Make, setting: Setting, steps: int, callback: pl.Callback) -> None:
    torch.manual_seed(0)
    module, whole = make()
    assert setting.micro_batch_size is not None
    count = setting.accumulate_grad_batches
    trainer = trainer_of(
        callback,
        *Setting(chosen=setting.chosen).callbacks(),
        max_steps=steps,
        accumulate_grad_batches=count,
        limit_val_batches=0,
        precision=setting.precision,
    )
    trainer.fit(module, Repeated(resize_batch(whole, SHARE, setting.micro_batch_size), steps * count))


def grid(checkpointed: bool) -> Iterator[Setting]:
    """Every setting that is tried, of a module whose blocks can be checkpointed or that has none."""
    for optimizer in ("", "fused_adamw", "optimizer_8bit"):
        for checkpointing in ("none", "full", "selective") if checkpointed else ("none",):
            for size in SIZES:
                setting = Setting(micro_batch_size=size, accumulate_grad_batches=SHARE // size)
                setting = setting.choose(optimizer) if optimizer else setting
                if checkpointing == "full":
                    setting = setting.choose("activation_checkpointing")
                elif checkpointing == "selective":
                    setting = setting.choose("activation_checkpointing", mode="selective", keep=["matmul", "attention"])
                yield setting
                if size == SHARE:
                    yield setting.choose("gradient_release")


def workload(make: Make, rates: Rates, limit: int | None) -> Workload:
    """One model's, for the planner."""
    module, batch = make()
    target, options = host_target(limit or _UNLIMITED), StepOptions("32-true", 1)
    facts = facts_of(module, target, options)
    return Workload(module, batch, options, SHARE, target, rates, facts, allow=check_allow(ALLOW))


def describe(options: Options) -> Row:
    """Measure the CPU."""
    CalibrationFile(cpu_name(), options.folder).keep(measure(torch.device("cpu")))
    return {}


def pairs_of(case: Named, options: Options, known: Row) -> Row:
    """Measure a model's grid, then plan and run for every limit."""
    make, rates, cache = case.of, calibrated(cpu_rates(), options.folder), ProfileCache(Path(options.folder))
    started = time.perf_counter()
    store = TraceStore(workload(make, rates, None), cache)
    solver, rows = Solver(store), []
    for setting in grid(store.plain().num_blocks > 0):
        seconds, peak = statistics.median(seconds_of(make, setting)), peak_of(make, setting)
        exact, predicted = not solver.numerics.severity(setting), solver.solve_uniform(setting).time.total
        rows.append({"setting": setting, "seconds": seconds, "peak": peak, "predicted": predicted, "exact": exact})
    plain = next(r["peak"] for r in rows if not r["setting"].chosen and r["setting"].micro_batch_size == SHARE)
    tried = [
        {"setting": _words(r["setting"]), "seconds": r["seconds"], "predicted_s": r["predicted"]}
        | {"peak_bytes": r["peak"]}
        for r in rows
    ]
    pairs = [_pair(make, rates, cache, rows, int(share * plain)) for share in LIMITS]
    return {"pairs": pairs, "grid": tried, "minutes": round((time.perf_counter() - started) / 60, 1)}


def _pair(make: Make, rates: Rates, cache: ProfileCache, rows: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Make a plan for a limit, run it, and hold it against the settings of the grid that stay within the limit."""
    fitting = sorted((r for r in rows if r["peak"] <= limit), key=lambda r: r["seconds"])
    plan = make_plan(workload(make, rates, limit), cache)
    row: dict[str, Any] = {"limit_bytes": limit, "num_fitting": len(fitting), "plan": plan.summary()}
    if plan.setting is not None:
        peak = peak_of(make, plan.setting, limit)
        exact = [r for r in fitting if r["exact"]]
        finalists = {_words(r["setting"]): r["setting"] for r in (*fitting[:_FINALISTS], *exact[:1])}
        times = in_turns(make, {"plan": plan.setting, **finalists})
        best = min(finalists, key=lambda words: times[words], default=None)
        kept = _words(exact[0]["setting"]) if exact else None
        row |= {
            "setting": _words(plan.setting),
            "fits": peak is not None,
            "exact": not plan.changes,
            "predicted_peak_bytes": plan.peak_bytes,
            "peak_bytes": peak,
            "predicted_s": plan.seconds_per_step,
            "seconds": times["plan"],
            "best": best,
            "best_s": None if best is None else times[best],
            "slower_than_best": None if best is None else times["plan"] / times[best] - 1,
            "best_exact": kept,
            "best_exact_s": None if kept is None else times[kept],
        }
    return row


def in_turns(make: Make, settings: dict[str, Setting]) -> dict[str, float]:
    """Seconds per step of settings that are measured one after the other, again and again; the first is the plan."""
    taken: dict[str, list[float]] = {words: [] for words in settings}
    found: dict[str, float] = {}
    for done in range(1, _MOST_ROUNDS + 1):
        for words, setting in settings.items():
            taken[words] += seconds_of(make, setting)
        found = {words: undisturbed(values) for words, values in taken.items()}
        plan, *others = found.values()
        if done >= _ROUNDS and plan <= (1 + _CLOSE) * min(others, default=plan):
            break
    return found


def undisturbed(seconds: list[float]) -> float:
    """The first quartile: what else a machine does makes steps slower, never faster."""
    return statistics.quantiles(seconds, n=4)[0]


def _words(setting: Setting) -> str:
    """A setting with its checkpointing told apart."""
    choice = setting.of_kind("checkpointing")
    if choice is None:
        return label(setting)
    mode = choice.options.get("mode", "full")
    if "choices" in choice.options:
        counts = Counter(choice.options["choices"])
        mode = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return label(setting).replace(choice.name, f"{choice.name} ({mode})")


# --- the page ---------------------------------------------------------------------------------------------------------


def text(document: dict[str, Any]) -> str:
    """Sentences with the totals; the rows are in the file."""
    models = document["rows"]
    pairs = [pair for model in models for pair in model["pairs"]]
    made = [pair for pair in pairs if "setting" in pair]
    refused = [pair for pair in pairs if "setting" not in pair]
    right = sum(not pair["num_fitting"] for pair in refused)
    slower = [pair["slower_than_best"] for pair in made if pair["slower_than_best"] is not None]
    errors = [row["predicted_s"] / row["seconds"] - 1 for model in models for row in model["grid"]]
    none_fits = f"Of {len(refused)} refused limits, {right} hold no setting of the grid either. " if refused else ""
    return (
        f"{', '.join(model['name'] for model in models)}: {sum(pair['fits'] for pair in made)} of {len(made)} plans "
        f"fit at the first try. {none_fits}"
        f"{sum(s <= 0.1 for s in slower)} of {len(slower)} are within 10 % of the grid's best: the slowest "
        f"{max(slower):+.0%}, the median {statistics.median(slower):+.0%} (below zero: faster). {exactness(made)}"
        f"Times of {len(errors)} settings, of which no step was known: median error "
        f"{statistics.median(map(abs, errors)):.1%}, largest {max(errors, key=abs):+.1%} "
        f"(`python -m benchmarks planner_pairs`, torch {document['versions']['torch']}, one CPU thread)."
    )


def exactness(made: list[dict[str, Any]]) -> str:
    """How many plans keep the recipe's numbers, and whether the others had to change them, where that was recorded."""
    told = [pair for pair in made if "exact" in pair]
    if not told:
        return ""
    lossy = [pair for pair in told if not pair["exact"]]
    within = sum(
        pair["best_exact_s"] is not None and pair["best_exact_s"] <= (1 + TOLERANCE) * pair["seconds"]
        for pair in lossy  # the fastest setting of the grid that keeps the numbers is fast enough
    )
    return (
        f"{len(told) - len(lossy)} of {len(told)} plans keep the recipe's numbers; for {len(lossy) - within} of the "
        f"other {len(lossy)}, what keeps them in the grid doesn't fit or takes over {TOLERANCE:.0%} longer. "
    )


BENCHMARK = Benchmark(
    RESULT,
    lambda options: [Named(name, make) for name, make in MODELS.items()],
    (Stage(pairs_of),),
    say=lambda row: f"{sum(pair.get('fits', False) for pair in row['pairs'])} plans fit, {row['minutes']} minutes",
    describe=describe,
    seconds=7200,
)
