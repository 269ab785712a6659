"""A plan for a module with several groups of blocks needs what its own trace needs, and a run can follow it."""

from functools import cache
from typing import Any

import pytest
import torch

from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.estimate.target import host_target
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload, facts_of
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting
from tests.contract.checkpointing.models import gpt2, t5
from tests.helpers.modules import LanguageModel

pytestmark = pytest.mark.nightly
SIZE = 4
MODES = {"none": None, "full": {}, "selective": {"mode": "selective", "keep": ["matmul", "attention"]}}


class Twice(LanguageModel):
    """Its blocks run twice in a step, the first time without gradients, as those of preferences do."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            before = super().training_step(batch, batch_idx)
        return (super().training_step(batch, batch_idx) - before).exp()


@cache
def search_of(name: str) -> Search:
    torch.manual_seed(0)
    module, length = (LanguageModel(t5().train()), 24) if name == "t5" else (Twice(gpt2().train()), 32)
    target, options = host_target(1 << 34), StepOptions("32-true", 1)
    ids = torch.randint(0, 64, (2, length))
    facts = facts_of(module, target, options)
    batch = {"input_ids": ids, "labels": ids}
    return Search(TraceStore(Workload(module, batch, options, SIZE, target, rates_of(target), facts)))


def can_need_less(search: Search) -> Any:
    model = search.solver.models.of(Setting())
    frontier = model.frontier(SIZE)
    assert frontier is not None
    assert frontier.minimum_bytes < model.peak_bytes(SIZE)
    return frontier


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "released"), [("t5", False), ("t5", True), ("twice", False)])
def test_a_plan_covers_all_blocks_as_a_run_does(name: str, mode: str, released: bool) -> None:
    search = search_of(name)
    # Passes are traced with two micro-batches in a step, where gradients lie beside activations.
    setting = Setting(micro_batch_size=SIZE, accumulate_grad_batches=1 if released else 2)
    if released:
        setting = setting.choose("gradient_release")
    if MODES[mode] is not None:
        setting = setting.choose("activation_checkpointing", **MODES[mode])
    solution = search.solver.solve_uniform(setting)
    assert solution.setting == setting
    assert solution.peak_bytes == pytest.approx(predict_peak_bytes(search.store.exactly(setting), SIZE), rel=0.01)


def test_blocks_that_run_twice_follow_one_choice() -> None:
    search = search_of("twice")
    assert can_need_less(search).minimum_bytes < 0.8 * search.solver.models.of(Setting()).peak_bytes(SIZE)


def test_less_memory_takes_a_plan_that_can_be_traced() -> None:
    search = search_of("t5")
    plan = can_need_less(search).plan_for(search.solver.models.of(Setting()).peak_bytes(SIZE) - 1)
    assert plan.choices != ("none",)
    assert plan.seconds > 0
    solution = search.solver.solve_uniform(
        Setting(micro_batch_size=SIZE).choose("activation_checkpointing", **(MODES["full"] or {}))
    )
    assert predict_peak_bytes(search.store.exactly(solution.setting), SIZE) <= solution.peak_bytes * 1.01
