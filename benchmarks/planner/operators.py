"""What issuing operators costs the program, plain and recomputed, in models so narrow that computing takes no time.

Forward and backward of one sample are timed in turns, plain and with every block checkpointed; operators are those that
the planner's traces count, so that `planner.time` can multiply the one with the other. Times are processor time of one
thread, the first quartile.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.runner import Benchmark, Named, Options, Row, Stage, named
from benchmarks.training import WithAdamW
from lightning_memfit.checkpointing.apply import apply_checkpointing
from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.estimate.target import host_target
from lightning_memfit.models import CausalLM
from lightning_memfit.planner.rates import cpu_rates
from lightning_memfit.planner.time import PassWork
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload, facts_of
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting

CHOICES: tuple[Choice, ...] = ("none", "full", "keep_matmul_attention")
_CONFIG = {
    "gpt2": {"model_type": "gpt2", "n_layer": 6, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8},
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 6,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 8,
    },
}
_ROUNDS = 60


class Perceptron(WithAdamW):
    """Blocks of two linear layers."""

    def __init__(self, width: int = 16, layers: int = 6) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.blocks(batch["x"])), batch["y"])


def module_of(name: str) -> Any:
    """A model of six narrow blocks."""
    torch.manual_seed(0)
    if name == "perceptron":
        return Perceptron()
    module = CausalLM(config=_CONFIG[name])
    module.configure_model()
    return module


def batch(name: str) -> dict[str, torch.Tensor]:
    """Eight tokens, or eight rows."""
    if name == "perceptron":
        return {"x": torch.ones(1, 8, 16), "y": torch.ones(1, 8, 1)}
    ids = torch.randint(0, 32, (1, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def counts(name: str) -> dict[str, float]:
    """Operators of a forward and backward pass by choice, as a trace has them."""
    target, options = host_target(1 << 34), StepOptions("32-true", 1)
    module = module_of(name)
    facts, two = facts_of(module, target, options), {k: torch.cat((v, v)) for k, v in batch(name).items()}
    store = TraceStore(Workload(module, two, options, 2, target, cpu_rates(), facts))
    return {choice: float(PassWork.of(store.passes(Setting(), choice)).counts.sum()) for choice in CHOICES}


def seconds(name: str) -> dict[str, float]:
    """Of a forward and backward pass by choice."""
    modules = {choice: module_of(name) for choice in CHOICES}
    for choice, module in modules.items():
        [group] = find_blocks(module)
        blocks = list(group.modules)
        apply_checkpointing(blocks, [choice] * len(blocks))
    taken: dict[str, list[float]] = {choice: [] for choice in CHOICES}
    for _ in range(_ROUNDS):
        for choice, module in modules.items():
            started = time.process_time()
            module.training_step(batch(name), 0).backward()
            taken[choice].append(time.process_time() - started)
            module.zero_grad()
    return {choice: statistics.quantiles(values, n=4)[0] for choice, values in taken.items()}


def measure(case: Named, options: Options, row: Row) -> Row:
    """Operators and seconds by choice, of six blocks."""
    return {"operators": counts(case.name), "seconds": seconds(case.name), "num_blocks": 6}


def weights(models: list[Row]) -> dict[str, list[float]]:
    """Plain operators that a recomputed operator and a recomputed block cost, by choice: least squares."""
    found = {}
    for choice in CHOICES[1:]:
        rows, costs = [], []
        for row in models:
            plain = row["seconds"]["none"] / row["operators"]["none"]
            rows.append([row["operators"][choice] - row["operators"]["none"], row["num_blocks"]])
            costs.append((row["seconds"][choice] - row["seconds"]["none"]) / plain)
        found[choice] = np.linalg.lstsq(np.array(rows), np.array(costs), rcond=None)[0].round(2).tolist()
    return found


BENCHMARK = Benchmark(
    "planner_operators.json",
    lambda options: named((*_CONFIG, "perceptron")),
    (Stage(measure),),
    lambda rows, options: {
        "weights": weights([row for row in rows if "failed" not in row]),
        "rows": rows,
    },
)
