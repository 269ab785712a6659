"""Plans of activation checkpointing for ten budgets each: predicted, traced and executed peaks, and how good they are.

GPT-2 (12 blocks) and a ViT, both narrow, are executed on the CPU with every storage followed; GPT-2-XL is traced for
an A100. Plans are held against the bound of a mixed-integer program, which needs scipy.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.runner import Benchmark, Options, Row, Stage
from benchmarks.text import table
from benchmarks.training import OwnLoss
from lightning_memfit.checkpointing.knapsack import CheckpointingProblem, PlanFrontier
from lightning_memfit.estimate.checkpointing_budget import BudgetPlanner, cpu_rate, device_rate
from lightning_memfit.memory import format_bytes
from lightning_memfit.profile.build import measure_step
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.checkpointing_budget import make_planner

RESULT = "checkpointing_budget.json"


@dataclass(frozen=True)
class Case:
    """A model, its batch, and whether it is executed."""

    name: str
    build: Callable[[], Any]
    batch: Callable[[], dict[str, torch.Tensor]]
    precision: str = "32-true"
    executed: bool = True


def gpt2(**sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)).train()

    return build


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"num_hidden_layers": 12, "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 384}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=8)).train()


def tokens(size: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 1000, (size, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def images(size: int, side: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(size, 3, side, side), "labels": torch.zeros(size, dtype=torch.long)}


CASES = (
    Case("GPT-2, 12 blocks of width 96, 8 x 128 tokens, fp32, executed on the CPU",
         gpt2(n_layer=12, n_embd=96, n_head=4, vocab_size=1000, n_positions=128), lambda: tokens(8, 128)),
    Case("ViT, 12 blocks of width 96, 16 images of 64 x 64, fp32, executed on the CPU", vit, lambda: images(16, 64)),
    Case("GPT-2-XL, 48 blocks, 4 x 1024 tokens, bf16, traced for an A100 80GB",
         gpt2(n_layer=48, n_embd=1600, n_head=25), lambda: tokens(4, 1024), "bf16-true", executed=False),
)  # fmt: skip


def measure(case: Case, options: Options, row: Row) -> Row:
    """Ten plans of a case, from the least that any needs to the plain peak."""
    with torch.device("cpu" if case.executed else "meta"):
        module = OwnLoss(case.build(), partial(torch.optim.AdamW, lr=1e-4, fused=True))
    batch = case.batch()
    planner = _planner(case, module, batch)
    problem = planner._frontiers[0][0].problem
    started = time.perf_counter()
    frontier = PlanFrontier(problem)
    solved_s = time.perf_counter() - started
    rows = []
    for budget in np.linspace(planner.minimum_bytes, planner.plain_peak_bytes, 10).astype(int).tolist():
        plan = frontier.plan_for(budget)
        bound = milp_bound_seconds(problem, budget)
        rows.append(
            {
                "budget_bytes": budget,
                "choices": dict(Counter(plan.choices)),
                "predicted_bytes": plan.peak_bytes,
                "observed_bytes": _observe(case, planner, module, batch, plan.choices),
                "extra_share": plan.seconds / planner.plain_seconds,
                "above_milp": plan.seconds / bound - 1 if bound > 1e-12 else 0.0,
            }
        )
    return {
        "executed": case.executed,
        "solved_s": solved_s,
        "rows": rows,
    }


def _planner(case: Case, module: Any, batch: Any) -> BudgetPlanner:
    options = StepOptions(case.precision)  # type: ignore[arg-type]
    if case.executed:
        return make_planner(
            module, batch, options, Emulation("cpu"), cpu_rate(torch.float32), ActivationCheckpointing, rounding_bytes=1
        )
    rate = replace(device_rate("A100 80GB", torch.bfloat16), host_link_bytes_per_s=None)
    return make_planner(module, batch, options, Emulation("cuda"), rate, ActivationCheckpointing)


def _observe(case: Case, planner: BudgetPlanner, module: Any, batch: Any, choices: Any) -> int:
    """Peak of two real steps, or of a trace of every block."""
    if case.executed:
        events = measure_step(module, batch, callbacks=(ActivationCheckpointing(choices=choices),)).events
    else:
        events = planner._trace_plan(choices).events
    return int(events.live_bytes(1 if case.executed else 512)[events.phases[0][0] :].max())


def milp_bound_seconds(problem: CheckpointingProblem, budget_bytes: int) -> float:
    """Extra time that no plan within the budget can be below (HiGHS' dual bound)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    num_blocks, width = len(problem.blocks), len(problem.blocks[0])
    kept = np.array([[o.kept_bytes for o in options] for options in problem.blocks]) / 1e6
    peaks = np.array([[o.peak_bytes for o in options] for options in problem.blocks]) / 1e6
    seconds = np.array([[o.seconds for o in options] for options in problem.blocks]) * 1e3
    one_each = np.kron(np.eye(num_blocks), np.ones(width))
    rows = np.zeros((num_blocks + 1, num_blocks, width))
    for block in range(num_blocks + 1):
        rows[block, :block] = kept[:block]
        if block < num_blocks:
            rows[block, block] = peaks[block]
    limits = np.full(num_blocks + 1, budget_bytes / 1e6)
    limits[-1] -= problem.head_bytes / 1e6
    within = LinearConstraint(rows.reshape(num_blocks + 1, -1), -np.inf, limits + 1e-9)
    result = milp(
        seconds.ravel(),
        constraints=[LinearConstraint(one_each, 1, 1), within],
        integrality=np.ones(num_blocks * width),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-4, "time_limit": 20},
    )
    return float(result.mip_dual_bound) / 1e3


def text(document: dict[str, Any]) -> str:
    """What all cases say together, and every third row of the last one."""
    cases = document["rows"]
    rows, lines = [row for case in cases for row in case["rows"]], []
    for row in cases[-1]["rows"][::3]:
        counts = ", ".join(f"{count} {choice}" for choice, count in sorted(row["choices"].items()))
        sizes = [format_bytes(row[f"{name}_bytes"]) for name in ("budget", "observed")]
        lines.append([*sizes, counts, f"{100 * row['extra_share']:.1f} %"])
    return (
        f"{len(rows)} budgets ({'; '.join(case['name'] for case in cases)}): no peak exceeds its budget. All plans of "
        f"a case are solved in at most {1e3 * max(case['solved_s'] for case in cases):.0f} ms, and none takes over "
        f"{100 * max(row['above_milp'] for row in rows):.2f} % more time than the bound of a mixed-integer program "
        f"(`benchmarks/results/{RESULT}`, by `python -m benchmarks checkpointing_budget`). Of the last case:\n\n"
    ) + table(["budget", "peak", "blocks", "more time"], lines)


BENCHMARK = Benchmark(RESULT, lambda options: CASES, (Stage(measure),), threads=None)
