"""How good plans are: pairs of a small model and a memory limit on the simulated device (CPU, one thread).

`python -m benchmarks.planner.pairs known` (or `held_out`, `benchmarks.planner.models.SETS`) writes that set's file in
`benchmarks/results`; models named after the set are measured anew, and the others in the file stay as they are.

The CPU is measured first, as `memfit doctor --measure` does; no step of these models is known to the planner. For every
model a grid of settings (optimizer x checkpointing of its repeated blocks x micro-batch, gradient release where a step
is one pass) is measured without a limit: peak of live bytes and time of an optimizer step, the median of five. For each
limit a plan is made and run under `MemoryLimit`, at once and only once. Its time is held against the best of the grid
that stays within the limit: the plan, the two fastest of those and the fastest one that keeps the recipe's numbers are
measured again in turns, so that what else the machine does meanwhile slows all alike. Times are processor time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.planner.models import SETS, SHARE, ModelSet
from benchmarks.record import write
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.estimate.target import host_target
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.measured import measure
from lightning_memfit.planner.plan import label
from lightning_memfit.planner.rates import CalibrationFile, Rates, calibrated, cpu_name, cpu_rates
from lightning_memfit.planner.solve import Solver
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload, check_allow, facts_of
from lightning_memfit.profile.build import resize_batch
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.precision import trainer_options
from lightning_memfit.techniques.core.setting import Setting

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

ALLOW = ("exact", "8bit")
SIZES = (1, 4, 16)
_UNLIMITED = 1 << 34
_STEPS, _SKIPPED = 7, 2
_FINALISTS, _ROUNDS, _MOST_ROUNDS = 2, 2, 6
_CLOSE = 0.05
"""A plan that seems slower than the best by more than this is measured in more rounds: noise looks the same."""

Make = Callable[[], tuple[pl.LightningModule, Any]]


class _Clock(pl.Callback):
    """Processor time of every optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = (0, time.process_time())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._last[0]:
            now = time.process_time()
            self.seconds.append(now - self._last[1])
            self._last = (trainer.global_step, now)


def seconds_of(make: Make, setting: Setting) -> list[float]:
    """Of the optimizer steps of a run without a limit, the first ones left out."""
    seconds, _ = run(make, setting, None)
    return seconds


def peak_of(make: Make, setting: Setting, limit: int = _UNLIMITED) -> int | None:
    """Peak of live bytes in two steps; None where they run out of memory."""
    _, peak = run(make, setting, limit)
    return peak


def run(make: Make, setting: Setting, limit: int | None) -> tuple[list[float], int | None]:
    """Seconds of steps without a limit; with one, the peak of two steps, or None where memory ran out."""
    torch.manual_seed(0)
    module, whole = make()
    assert setting.micro_batch_size is not None
    count, steps = setting.accumulate_grad_batches, 2 if limit else _STEPS
    batch = resize_batch(whole, SHARE, setting.micro_batch_size)
    loader: DataLoader[Any] = DataLoader([batch] * (steps * count), batch_size=None)  # type: ignore[arg-type]
    clock, guard = _Clock(), [MemoryLimit(limit)] if limit else []
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=count,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **trainer_options([*guard, *Setting(chosen=setting.chosen).callbacks(), clock], setting.precision),
    )
    try:
        trainer.fit(module, loader)
    except torch.OutOfMemoryError:
        return [], None
    if guard:
        assert guard[0].ledger is not None
        return [], guard[0].ledger.peak_bytes
    return clock.seconds[_SKIPPED:], None


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


def model_rows(name: str, make: Make, limits: tuple[float, ...], rates: Rates, cache: ProfileCache) -> dict[str, Any]:
    """Measure a model's grid, then plan and run for every limit."""
    store = TraceStore(workload(make, rates, None), cache)
    solver, rows = Solver(store), []
    for setting in grid(store.plain().num_blocks > 0):
        seconds, peak = statistics.median(seconds_of(make, setting)), peak_of(make, setting)
        exact, predicted = not solver.numerics.severity(setting), solver.solve_uniform(setting).time.total
        rows.append({"setting": setting, "seconds": seconds, "peak": peak, "predicted": predicted, "exact": exact})
    plain = next(r["peak"] for r in rows if not r["setting"].chosen and r["setting"].micro_batch_size == SHARE)
    return {
        "model": name,
        "pairs": [_pair(make, rates, cache, rows, int(share * plain)) for share in limits],
        "grid": [
            {
                "setting": _words(row["setting"]),
                "seconds": row["seconds"],
                "predicted_s": row["predicted"],
                "peak_bytes": row["peak"],
            }
            for row in rows
        ],
    }


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
    print(f"{limit / 2**20:.0f} MiB: {row}", flush=True)
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


def measured_before(file: Path, chosen: ModelSet, names: list[str]) -> list[dict[str, Any]]:
    """Rows of the other models of a set that a file already has."""
    before = json.loads(file.read_text())["models"] if names and file.exists() else []
    return [row for row in before if row["model"] in chosen.models and row["model"] not in names]


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=tuple(SETS))
    parser.add_argument("models", nargs="*", help="those of the set to measure; all by default")
    arguments = parser.parse_args()
    chosen, names = SETS[arguments.set], arguments.models
    unknown = [name for name in names if name not in chosen.models]
    if unknown:
        parser.error(f"{', '.join(unknown)} is none of {', '.join(chosen.models)}")
    file, order = RESULTS / chosen.file, list(chosen.models)
    rows = measured_before(file, chosen, names)
    with tempfile.TemporaryDirectory() as folder:
        CalibrationFile(cpu_name(), Path(folder)).keep(measure(torch.device("cpu")))
        rates = calibrated(cpu_rates(), Path(folder))
        for name in names or order:
            started = time.perf_counter()
            row = model_rows(name, chosen.models[name], chosen.limits, rates, ProfileCache(Path(folder)))
            minutes = round((time.perf_counter() - started) / 60, 1)
            rows = sorted([*rows, row | {"minutes": minutes}], key=lambda one: order.index(one["model"]))
            write(file, {"load": round(os.getloadavg()[0], 2), "models": rows})  # known, should this end early
    return 0


if __name__ == "__main__":
    sys.exit(main())
