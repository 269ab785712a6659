"""Plan for ten budgets each: `python -m benchmarks.checkpointing_budget.run`.

GPT-2 (12 blocks) and a ViT, both narrow, are executed on the CPU with every storage followed; GPT-2-XL is traced for
an A100. Writes `benchmarks/results/checkpointing_budget.json`, from which `benchmarks.pages` makes
the tables of the technique's page. The mixed-integer program needs scipy.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpointing_budget.milp import milp_bound_seconds
from benchmarks.estimator.cases import HuggingFaceModule
from benchmarks.record import write
from lightning_memfit.checkpointing.knapsack import PlanFrontier
from lightning_memfit.estimate.checkpointing_budget import BudgetPlanner, cpu_rate, device_rate
from lightning_memfit.profile.build import measure_step
from lightning_memfit.profile.events import EventList
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.checkpointing_budget import make_planner

OUT = Path(__file__).parents[1] / "results" / "checkpointing_budget.json"


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


def run_case(case: Case) -> dict[str, Any]:
    with torch.device("cpu" if case.executed else "meta"):
        module = HuggingFaceModule(case.build, "adamw_fused")
    batch = case.batch()
    started = time.perf_counter()
    planner = _planner(case, module, batch)
    traced_s = time.perf_counter() - started
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
        print(case.name, rows[-1], flush=True)
    return {
        "name": case.name,
        "executed": case.executed,
        "num_blocks": len(problem.blocks),
        "num_plans": len(frontier._needs),
        "plain_peak_bytes": planner.plain_peak_bytes,
        "minimum_bytes": planner.minimum_bytes,
        "uniform_traces_s": traced_s,
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
    if not case.executed:
        return _peak(planner._trace_plan(choices).events, 512)
    return _peak(measure_step(module, batch, callbacks=(ActivationCheckpointing(choices=choices),)).events, 1)


def _peak(events: EventList, rounding_bytes: int) -> int:
    return int(events.live_bytes(rounding_bytes)[events.phases[0][0] :].max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    write(parser.parse_args().out, {"cases": [run_case(case) for case in CASES]})


if __name__ == "__main__":
    main()
