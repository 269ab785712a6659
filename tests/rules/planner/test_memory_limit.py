"""Plans for a `MemoryLimit`, which sees tensors and not what kernels give back before they end."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.estimate.target import host_target
from lightning_memfit.planner.rates import Rates
from lightning_memfit.planner.solve import Solver
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload, facts_of
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting
from tests.helpers.trainers import quiet_trainer

LIMIT = 1 << 30
RATES = Rates("made up", {"float32": 1e11}, 1e10, 8e-6, False)


class Convolutions(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def store_for(module, batch, limit):
    target, options = host_target(limit), StepOptions("32-true", 1)
    return TraceStore(Workload(module, batch, options, len(batch), target, RATES, facts_of(module, target, options)))


def measured_bytes(module, batch):
    guard = MemoryLimit(LIMIT)
    trainer = quiet_trainer(guard, max_steps=2, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader([batch] * 4, batch_size=None))
    return guard.ledger.peak_bytes


def test_a_plan_needs_what_the_limit_counts():
    batch = torch.randn(32, 3, 32, 32)
    limited, unlimited = (store_for(Convolutions(), batch, limit) for limit in (LIMIT, None))
    setting = Setting(micro_batch_size=len(batch) // 2, accumulate_grad_batches=2)
    predicted = Solver(limited).solve_uniform(setting).peak_bytes
    measured = measured_bytes(Convolutions(), batch[: len(batch) // 2])
    assert predicted == pytest.approx(measured, rel=0.01)
    # Memory that isn't counted is needed all the same, where nothing but the machine limits the run.
    assert predict_peak_bytes(unlimited.passes(setting, "none"), len(batch) // 2) > 1.01 * measured
