"""Under ZeRO, steps by hand and writes into weights are those of one device, or are refused by name."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import ranks
from tests.helpers.ranks import Ended, run_ranks
from tests.helpers.trainers import quiet_trainer

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

STAGES: dict[str, dict[str, Any]] = {
    "stage_1": {"stage": 1},
    "stage_2": {"stage": 2},
    "stage_3": {"stage": 3},
    "offload": {"stage": 2, "offload_optimizer": True},
    "in_parts": {
        "stage": 3,
        "offload_optimizer": True,
        "config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    },
}
Case = Callable[["Steps", Any, int], Any]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


class Steps(pl.LightningModule):
    """Two layers and one that a step may leave out; its `training_step` is the function that it is given."""

    def __init__(self, step: Case, by_hand: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization, self.step = not by_hand, step
        self.net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
        self.other = nn.Linear(4, 2)

    def forward(self, batch: Any, other: bool = True) -> Tensor:
        predicted = self.net(batch[0])
        return (predicted + self.other(batch[0]) if other else predicted).sub(batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    def train_dataloader(self) -> DataLoader:
        generator, count = torch.Generator().manual_seed(1), ranks.num_ranks
        data = torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator)
        rank = int(os.environ.get("RANK", 0)) if count > 1 else 0
        return DataLoader(TensorDataset(*(one[rank::count] for one in data)), batch_size=4 // count)

    val_dataloader = test_dataloader = train_dataloader


def over_batches(module: Steps, batch: Any, batch_idx: int) -> None:
    """Accumulate over two batches; the other layer is in the first alone."""
    module.manual_backward(module(batch, batch_idx % 2 == 0) / 2)
    if batch_idx % 2:
        module.optimizers().step()
        module.optimizers().zero_grad()


def within_a_batch(module: Steps, batch: Any, batch_idx: int) -> None:
    """Two passes before a step, and two steps; before, a pass whose gradients are thrown away."""
    module.manual_backward(module(batch) * 5)
    for _ in range(2):
        module.optimizers().zero_grad()
        module.manual_backward(module(batch))
        module.manual_backward(module(batch, False) * 2)
        module.optimizers().step()


def clipped(module: Steps, batch: Any, batch_idx: int) -> None:
    """Every other step is clipped."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(module(batch))
    if batch_idx % 2:
        module.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
    optimizer.step()


BY_HAND: dict[str, Case] = {one.__name__: one for one in (over_batches, within_a_batch, clipped)}


def weights(module: pl.LightningModule, strategy: Any, *callbacks: pl.Callback, **options: Any) -> dict[str, Tensor]:
    """Train, and return whole master weights."""
    fit(module, strategy, *callbacks, **options)
    if strategy is None:
        return {name: one.detach().clone() for name, one in module.named_parameters()}
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(one).clone() for name, one in module.named_parameters()}


def fit(module: pl.LightningModule, strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    from lightning_memfit.strategies import ZeroStrategy

    chosen = "auto" if strategy is None else ZeroStrategy(**copy.deepcopy(strategy))
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0} | options
    devices = 1 if strategy is None else ranks.num_ranks
    trainer = quiet_trainer(*callbacks, strategy=chosen, devices=devices, use_distributed_sampler=False, **options)
    trainer.fit(module)
    return trainer


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def on_ranks(folder: Path, expected: dict[str, dict[str, Tensor]], train: Callable[[str, Any], Any]) -> list[Ended]:
    """Call `train(name, strategy)` on two ranks for all stages, and compare with the weights that one device has."""

    def run() -> dict[str, float | str]:
        found: dict[str, float | str] = {}
        for name in expected:
            for stage, strategy in STAGES.items():
                try:
                    found[f"{name}, {stage}"] = furthest(train(name, strategy), expected[name])
                except MisconfigurationException as error:
                    found[f"{name}, {stage}"] = str(error)
        return found

    ended = run_ranks(run, 2, folder, seconds=200)
    assert all(one.code == 0 for one in ended), ended[0].output[-5000:]
    return ended


def test_steps_by_hand_are_those_of_one_device(tmp_path: Path) -> None:
    def train(name: str, strategy: Any) -> dict[str, Tensor]:
        return weights(Steps(BY_HAND[name]), strategy)

    expected = {name: train(name, None) for name in BY_HAND}
    for ended in on_ranks(tmp_path, expected, train):
        assert {name: one for name, one in ended.result.items() if isinstance(one, str) or one > 2e-6} == {}
