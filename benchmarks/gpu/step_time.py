"""Step times that the planner predicts, beside measured ones: `python -m benchmarks.gpu.step_time`.

    python -m benchmarks.gpu.step_time [--device cuda|cpu] [--scale full|small] [--output FILE] [--learn]

Every setting is timed in a process of its own. Predictions are given three times: by data sheet, corrected by all
*other* settings (as a later plan would be by earlier runs), and by a fit to all of them. With `--learn` the
measurements are kept for later plans on this machine. The exit code is 1 if a setting failed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.processes import Job, in_a_process, rows_of
from benchmarks.record import trainer_of, write_aside
from lightning_memfit.estimate.target import Target, host_target, live_target
from lightning_memfit.memory.kind import synchronize
from lightning_memfit.models import CausalLM
from lightning_memfit.planner.rates import CalibrationFile, Observation, fit_factors, rates_of, uncorrected
from lightning_memfit.planner.solve import Solver
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload, check_allow, facts_of
from lightning_memfit.profile.build import resize_batch
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
ALLOW = ("exact", "tf32", "bf16", "fp16", "8bit")
_STEPS, _SKIPPED = 8, 3
_UNLIMITED = 1 << 40


@dataclass(frozen=True)
class Model:
    """A GPT-2 and its batch."""

    name: str
    config: dict[str, int]
    samples: int
    """Per optimizer step."""
    tokens: int

    def build(self) -> CausalLM:
        """The module without weights."""
        return CausalLM(config={"model_type": "gpt2", **self.config})

    def batch(self) -> dict[str, torch.Tensor]:
        """Random ids for one optimizer step."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.config["vocab_size"], (self.samples, self.tokens), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


def _gpt2(name: str, width: int, layers: int, heads: int, samples: int, tokens: int, vocabulary: int) -> Model:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": tokens, "vocab_size": vocabulary}
    return Model(name, sizes, samples, tokens)


MODELS = {
    "full": (
        _gpt2("gpt2", 768, 12, 12, 16, 1024, 50257),
        _gpt2("gpt2-medium", 1024, 24, 16, 8, 1024, 50257),
        _gpt2("gpt2-large", 1280, 36, 20, 4, 1024, 50257),
    ),
    "small": (_gpt2("gpt2-tiny", 64, 3, 2, 4, 32, 128),),
}


@dataclass(frozen=True)
class Case:
    """One setting of one model."""

    model: Model
    setting: Setting
    device: str

    @property
    def name(self) -> str:
        """Model and techniques in a line."""
        parts = [choice.name for choice in self.setting.chosen] or ["32-true"]
        sizes = f"{self.setting.micro_batch_size} x {self.setting.accumulate_grad_batches}"
        return f"{self.model.name}, {' + '.join(parts)}, {sizes}"


def cases(scale: str, device: str) -> Iterator[Case]:
    """Precisions, optimizers, checkpointing and micro-batches of every model."""
    for model in MODELS[scale]:
        whole = Setting(micro_batch_size=model.samples, accumulate_grad_batches=1)
        half = Setting(micro_batch_size=model.samples // 2, accumulate_grad_batches=2)
        yield Case(model, whole, device)
        yield Case(model, half.choose("bf16_mixed"), device)
        if scale == "small":
            continue
        yield Case(model, whole.choose("bf16_mixed").choose("activation_checkpointing"), device)
        yield Case(model, whole.choose("tf32"), device)
        yield Case(model, whole.choose("bf16_mixed"), device)
        yield Case(model, whole.choose("bf16_mixed").choose("fused_adamw"), device)
        yield Case(model, whole.choose("bf16_mixed").choose("optimizer_8bit"), device)


def target_of(device: str) -> Target:
    """What is planned for.

    Raises:
        ValueError: If there is no such device.
    """
    if device == "cpu":
        return host_target(_UNLIMITED)
    target = live_target()
    if target is None:
        raise ValueError("`--device cuda`: torch sees no CUDA device here.")
    return target


def describe(case: Case) -> dict[str, Any]:
    """What is planned for, found in a process that ends: one that has a CUDA context can't be forked."""
    return {"name": case.name, "target": target_of(case.device)}


def predict(case: Case, target: Target) -> dict[str, Any]:
    """Seconds of one setting by data sheet, and what they are made of."""
    _quiet(case.device)
    options, rates = StepOptions("32-true", 1), rates_of(target)
    module, batch = case.model.build(), case.model.batch()
    facts = facts_of(module, target, options)
    workload = Workload(module, batch, options, case.model.samples, target, rates, facts, allow=check_allow(ALLOW))
    predicted = Solver(TraceStore(workload)).solve_uniform(case.setting).time.seconds
    return {"name": case.name, "rates": rates.name, "predicted": dict(uncorrected(predicted, rates))}


def measure(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    """The row of a prediction with the seconds that the setting takes."""
    _quiet(case.device)
    return {**row, "seconds": statistics.median(_timed(case)[_SKIPPED:])}


def run(chosen: Sequence[Case], seconds: float, processes: int) -> Iterator[dict[str, Any]]:
    """Rows of all cases: predicted several at a time, then timed one after the other.

    Args:
        chosen: Cases of one device.
        seconds: A prediction or measurement that takes longer is killed.
        processes: Predictions at a time.
    """
    with torch.device("meta"):
        chosen[0].model.build().configure_model()  # imports here what every process would import again
    about = in_a_process(describe, chosen[0], seconds=seconds)
    if "failed" in about:
        yield about
        return
    predicted = rows_of([Job(predict, case, (about["target"],)) for case in chosen], seconds, processes)
    rows = {row["name"]: row for row in predicted}
    for case in chosen:
        row = rows[case.name]
        yield row if "failed" in row else in_a_process(measure, case, row, seconds=seconds)


def _quiet(device: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if device == "cpu":
        torch.set_num_threads(1)


class _Clock(pl.Callback):
    """Seconds of every optimizer step, the device's work included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._step, self._last = 0, 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self._step:
            synchronize(trainer.strategy.root_device)
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._step, self._last = trainer.global_step, now


def _timed(case: Case) -> list[float]:
    torch.manual_seed(0)
    setting, clock = case.setting, _Clock()
    assert setting.micro_batch_size is not None
    batch = resize_batch(case.model.batch(), case.model.samples, setting.micro_batch_size)
    loader: DataLoader[Any] = DataLoader(
        [batch] * (_STEPS * setting.accumulate_grad_batches),  # type: ignore[arg-type]
        batch_size=None,
    )
    trainer = trainer_of(
        *Setting(chosen=setting.chosen).callbacks(),
        clock,
        max_steps=_STEPS,
        device=case.device,
        precision=setting.precision,
        accumulate_grad_batches=setting.accumulate_grad_batches,
    )
    module = case.model.build()
    if case.device == "cuda":  # random numbers for a billion weights take minutes on a CPU
        with torch.device("cuda"):
            module.configure_model()
    trainer.fit(module, loader)
    return clock.seconds


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows with their errors by data sheet, corrected by the other rows, and fitted to all."""
    seen = [Observation(row["predicted"], row["seconds"]) for row in rows]
    errors: dict[str, list[float]] = {"data sheet": [], "corrected by the others": [], "fitted": []}
    fitted = fit_factors(seen)
    for index, row in enumerate(rows):
        others = [*seen[:index], *seen[index + 1 :]]
        factors = {
            "data sheet": dict.fromkeys(row["predicted"], 1.0),
            "corrected by the others": fit_factors(others) if others else dict.fromkeys(row["predicted"], 1.0),
            "fitted": fitted,
        }
        row["errors"] = {
            name: sum(value * known[part] for part, value in row["predicted"].items()) / row["seconds"] - 1
            for name, known in factors.items()
        }
        for name, error in row["errors"].items():
            errors[name].append(abs(error))
    return {
        "median_error": {name: statistics.median(values) for name, values in errors.items()},
        "largest_error": {name: max(values) for name, values in errors.items()},
        "factors": fitted,
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--scale", choices=tuple(MODELS), default="full")
    parser.add_argument(
        "--output", type=Path, default=None, help="default: step_time_DEVICE.json in the results of the GPU suite"
    )
    parser.add_argument("--learn", action="store_true", help="keep the measurements for later plans on this machine")
    parser.add_argument("--case-seconds", type=float, default=60.0, help="a setting that takes longer is killed")
    parser.add_argument("--processes", type=int, default=1, help="predictions at a time (default: 1)")
    arguments = parser.parse_args(argv)
    output = arguments.output or RESULTS / f"step_time_{arguments.device}.json"
    rows, failed = list[dict[str, Any]](), list[dict[str, Any]]()
    found: dict[str, Any] = {"rows": rows}
    for row in run(list(cases(arguments.scale, arguments.device)), arguments.case_seconds, arguments.processes):
        (failed if "failed" in row else rows).append(row)
        what = row.get("failed") or f"{row['seconds']:.4f} s, {sum(row['predicted'].values()):.4f} s by data sheet"
        print(f"{row['name']}: {what}", flush=True)
        if rows and arguments.learn and row is rows[-1]:
            CalibrationFile(row["rates"]).add(row["predicted"], row["seconds"])
        found = compared(rows) if rows else found
        write_aside(output, {"device": arguments.device, "scale": arguments.scale, **found, "failed": failed})
    for name, error in found.get("median_error", {}).items():
        print(f"{name}: median error {error:.1%}, largest {found['largest_error'][name]:.1%}")
    return int(bool(failed) or not rows)


if __name__ == "__main__":
    sys.exit(main())
