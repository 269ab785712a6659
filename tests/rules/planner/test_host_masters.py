"""Host memory of host masters as it is planned is that of a measured step."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.estimate.target import host_target
from lightning_memfit.memory import Category, Tier
from lightning_memfit.planner.memory import MemoryModel
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload, facts_of
from lightning_memfit.profile.build import measure_step
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.host_master_weights import HostMasterWeights
from tests.rules.planner.made import RATES, RUNTIME

FROZEN, TRAINED, BUFFERS = 64 * 64, 64 * 32, 64
SETTING = Setting(micro_batch_size=2).choose("host_master_weights")


class PartlyFrozen(pl.LightningModule):
    """One frozen and one trained layer, and buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64, bias=False, dtype=dtype).requires_grad_(False)
        self.trained = nn.Linear(64, 32, bias=False)
        self.register_buffer("scale", torch.ones(64, dtype=dtype))
        self.register_buffer("index", torch.arange(7))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.frozen(batch["x"].to(self.scale.dtype)) * self.scale
        return self.trained(hidden.relu().to(self.trained.weight.dtype)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained.parameters())


class Late(PartlyFrozen):
    """Makes its tensors in the run's precision, so that nothing is rounded."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.frozen = None

    def configure_model(self) -> None:
        if self.frozen is None:
            del self.frozen
            made = PartlyFrozen(torch.get_default_dtype())
            self.frozen, self.trained = made.frozen, made.trained
            for name, buffer in made.named_buffers():
                self.register_buffer(name, buffer)


MODULES = {
    "float32": (PartlyFrozen, 4, 4),
    "float64": (lambda: PartlyFrozen(torch.float64), 8, 8),
    "bfloat16": (lambda: PartlyFrozen(torch.bfloat16), 0, 0),
    "late": (Late, 0, 0),
}
BATCH = {"x": torch.ones(2, 64)}


def planned(module: Any, on_cuda: bool) -> MemoryModel:
    target = host_target(1 << 34)
    rates = rates_of(target)
    if on_cuda:
        target, rates = replace(target, kind="cuda", capability=(8, 0), runtime=RUNTIME), RATES
    options = StepOptions("32-true", 1)
    workload = Workload(module, BATCH, options, 2, target, rates, facts_of(module, target, options))
    return Search(TraceStore(workload)).solver.models.of(SETTING)


@pytest.mark.nightly_cases("float64", "bfloat16", "late")
@pytest.mark.parametrize("name", MODULES)
def test_values_of_frozen_weights_and_buffers_lie_on_the_host(name: str) -> None:
    make, frozen, buffers = MODULES[name]
    host = planned(make(), True).off_device().by_category(Tier.HOST)
    assert host[Category.PARAMETER] == 4 * TRAINED + frozen * FROZEN
    assert host.get(Category.BUFFER, 0) == buffers * BUFFERS
    options = StepOptions("bf16-true", 1)
    measured = estimate_step(measure_step(make(), BATCH, options, callbacks=(HostMasterWeights(),)))
    # The step counter, one number, isn't on the device in the trace that states are read off.
    assert host.pop(Category.OPTIMIZER_STATE) + 4 == measured.breakdown.get(Category.OPTIMIZER_STATE, Tier.HOST)
    assert host == {
        category: size
        for category, size in measured.breakdown.by_category(Tier.HOST).items()
        if category is not Category.OPTIMIZER_STATE
    }


def test_on_the_cpu_they_lie_beside_the_weights() -> None:
    model = planned(PartlyFrozen(), False)
    assert not model.off_device().entries
    found = model.breakdown(model.peak_bytes(2), 2)
    assert found.get(Category.PARAMETER) == (4 + 2) * (FROZEN + TRAINED)
    assert found.get(Category.BUFFER) == (4 + 2) * BUFFERS + 7 * 8


class Wide(PartlyFrozen):
    """Has a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1 << 16))


def test_buffers_stay_on_the_device() -> None:
    """Plans had no room for them."""
    small, wide = (planned(make(), True) for make in (PartlyFrozen, Wide))
    assert wide.peak_bytes(2) - small.peak_bytes(2) == 2 << 16
