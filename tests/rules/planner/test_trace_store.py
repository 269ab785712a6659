import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memfit.estimate.target import named_target
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.trace_store import TraceStore, only_stepping
from lightning_memfit.planner.workload import Workload, facts_of
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import TraceError


class Branching(pl.LightningModule):
    """Keeps much or little, by what its floats are."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 4096)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.small(batch)
        if hidden.mean() > 0.5:
            return self.large(hidden).exp().mean()
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Steady(Branching):
    """Does the same whatever its floats are."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.small(batch).square().mean()


def test_no_plan_rests_on_one_of_several_branches() -> None:
    module, target, options, batch = Branching(), named_target("12GiB"), StepOptions("32-true"), torch.zeros(16, 8)
    workload = Workload(module, batch, options, 16, target, rates_of(target), facts_of(module, target, options))
    with pytest.raises(TraceError, match="only real data can tell"):
        TraceStore(workload).plain()


def test_a_profile_whose_values_were_not_checked_is_none_of_a_checked_step(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"any_micro_batch": False, "cache": ProfileCache(tmp_path)}
    assert profile_module(Branching(), torch.zeros(16, 8), check_assumptions=False, **settings).assumptions
    with pytest.raises(TraceError, match="only real data can tell"):
        profile_module(Branching(), torch.zeros(16, 8), **settings)


def test_a_checked_profile_answers_who_asks_for_none(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"any_micro_batch": False, "cache": ProfileCache(tmp_path)}
    module = Steady()
    profile_module(module, torch.zeros(16, 8), **settings)
    monkeypatch.setattr("lightning_memfit.profile.build.trace_step", None)
    profile_module(module, torch.zeros(16, 8), check_assumptions=False, **settings)


def test_a_module_that_only_steps_can_be_sent_to_another_process() -> None:
    stepping = only_stepping(Steady(), 3)
    sent = pickle.loads(pickle.dumps(stepping))
    assert isinstance(sent, Steady)
    assert sent.memfit_num_blocks == 3
    assert sent.training_step(None, 0) == stepping.training_step(None, 0)
