"""Step times that the planner predicts, beside measured ones.

Predictions are given three times: by data sheet, corrected by all *other* settings (as a later plan would be by earlier
runs), and by a fit to all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GPT2LMHeadModel  # noqa: F401  (imported before the fork: children start at once)

from benchmarks.runner import DEVICE, SMALL, Benchmark, Options, Row, Stage
from benchmarks.training import Clock, Repeated, trainer_of
from lightning_memfit.estimate.target import Target, host_target, live_target
from lightning_memfit.models import CausalLM
from lightning_memfit.planner.rates import CalibrationFile, Observation, fit_factors, rates_of, uncorrected
from lightning_memfit.planner.solve import Solver
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload, check_allow, facts_of
from lightning_memfit.profile.build import resize_batch
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting

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


MODELS = (
    _gpt2("gpt2", 768, 12, 12, 16, 1024, 50257),
    _gpt2("gpt2-medium", 1024, 24, 16, 8, 1024, 50257),
    _gpt2("gpt2-large", 1280, 36, 20, 4, 1024, 50257),
)
SMALL_MODEL = _gpt2("gpt2-tiny", 64, 3, 2, 4, 32, 128)


@dataclass(frozen=True)
class Case:
    """One setting of one model."""

    model: Model
    setting: Setting

    @property
    def name(self) -> str:
        """Model and techniques in a line."""
        parts = [choice.name for choice in self.setting.chosen] or ["32-true"]
        sizes = f"{self.setting.micro_batch_size} x {self.setting.accumulate_grad_batches}"
        return f"{self.model.name}, {' + '.join(parts)}, {sizes}"


def cases(options: Options) -> Iterator[Case]:
    """Precisions, optimizers, checkpointing and micro-batches of every model."""
    for model in [SMALL_MODEL] if options.small else MODELS:
        whole = Setting(micro_batch_size=model.samples, accumulate_grad_batches=1)
        half = Setting(micro_batch_size=model.samples // 2, accumulate_grad_batches=2)
        mixed = whole.choose("bf16_mixed")
        yield Case(model, whole)
        yield Case(model, half.choose("bf16_mixed"))
        if options.small:
            continue
        yield Case(model, mixed.choose("activation_checkpointing"))
        yield Case(model, whole.choose("tf32"))
        yield Case(model, mixed)
        yield Case(model, mixed.choose("fused_adamw"))
        yield Case(model, mixed.choose("optimizer_8bit"))


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


def predict(case: Case, options: Options, row: Row) -> Row:
    """Seconds of one setting by data sheet, and what they are made of."""
    target: Target = options.found["target"]
    steps, rates, model = StepOptions("32-true", 1), rates_of(target), case.model
    module, allow = model.build(), check_allow(ALLOW)
    facts = facts_of(module, target, steps)
    workload = Workload(module, model.batch(), steps, model.samples, target, rates, facts, allow=allow)
    predicted = Solver(TraceStore(workload)).solve_uniform(case.setting).time.seconds
    return {"rates": rates.name, "predicted": dict(uncorrected(predicted, rates))}


def measure(case: Case, options: Options, row: Row) -> Row:
    """The seconds that the setting takes."""
    torch.manual_seed(0)
    setting, clock, module = case.setting, Clock(time.perf_counter), case.model.build()
    assert setting.micro_batch_size is not None
    batch = resize_batch(case.model.batch(), case.model.samples, setting.micro_batch_size)
    count = setting.accumulate_grad_batches
    others = {"precision": setting.precision, "accumulate_grad_batches": count, "device": options.device}
    trainer = trainer_of(*Setting(chosen=setting.chosen).callbacks(), clock, max_steps=_STEPS, **others)
    if options.device == "cuda":  # random numbers for a billion weights take minutes on a CPU
        with torch.device("cuda"):
            module.configure_model()
    trainer.fit(module, Repeated(batch, _STEPS * count))
    seconds = statistics.median(clock.seconds[_SKIPPED:])
    if options.learn:
        CalibrationFile(row["rates"]).add(row["predicted"], seconds)
    return {"seconds": seconds}


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


def _figures(rows: list[Row], options: Options) -> Row:
    good = [row for row in rows if "failed" not in row]
    failed = [row for row in rows if "failed" in row]
    return {"device": options.device, **(compared(good) if good else {}), "rows": [*good, *failed]}


BENCHMARK = Benchmark(
    "gpu/step_time_{device}.json",
    cases,
    (Stage(predict, timed=False), Stage(measure)),
    _figures,
    lambda row: f"{row['seconds']:.4f} s, {sum(row['predicted'].values()):.4f} s by data sheet",
    describe=lambda options: {"target": target_of(options.device)},
    seconds=60,
    arguments=(
        DEVICE,
        SMALL,
        ("--learn", {"action": "store_true", "help": "keep the measurements for later plans on this machine"}),
    ),
)
