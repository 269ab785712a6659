"""Lightning's `EMAWeightAveraging` under FSDP2: averages in parts, as on one device, saved, resumed and exported.

Asked for in https://github.com/Lightning-AI/pytorch-lightning/issues/10914.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memfit import FullyShardedStrategy
from lightning_memfit.strategies.checkpoint_io import consolidated
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

STEPS, SAVED_AT = 8, 4


class Averaged(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 4))
        self.validated: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(float(self.training_step(batch, batch_idx)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader([torch.linspace(-1, 1, 8)] * 16, batch_size=2)

    val_dataloader = train_dataloader


class Saving(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT and not self.path.exists():
            trainer.save_checkpoint(self.path)


def train(path: Path, *callbacks: pl.Callback, resume: bool = False, **options: Any) -> tuple[list[float], Any]:
    """Losses of validation, which are those of averages, and the weights at the end."""
    module = Averaged()
    limits = {"max_steps": STEPS, "max_epochs": -1, "limit_val_batches": 1, "val_check_interval": 2}
    trainer = quiet_trainer(
        EMAWeightAveraging(decay=0.9),
        *callbacks,
        **{**limits, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0, **options},
    )
    trainer.fit(module, ckpt_path=path if resume else None)
    weights = {n: getattr(p, "full_tensor", p.clone)().detach().clone() for n, p in module.named_parameters()}
    return module.validated, weights


def on_two_ranks(path: Path) -> list[Any]:
    options = {"devices": 2, "use_distributed_sampler": False}
    found = []
    for resume in (False, True):
        strategy = FullyShardedStrategy(process_group_backend="gloo")
        found.append(train(path, Saving(path), resume=resume, strategy=strategy, **options))
    return found


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_averages_in_parts_are_those_of_one_device(tmp_path: Path) -> None:
    whole = tmp_path / "whole.ckpt"
    validated, weights = train(whole, Saving(whole))
    for ended in run_ranks(on_two_ranks, 2, tmp_path / "ranks", tmp_path / "parts.ckpt"):
        assert ended.code == 0, ended.output[-3000:]
        (at_once, at_end), (resumed, end_of_resumed) = ended.result
        assert at_once == pytest.approx(validated, abs=1e-6)
        assert resumed == pytest.approx(validated[SAVED_AT // 2 :], abs=1e-6)
        assert difference(weights, at_end) < 1e-6
        assert difference(weights, end_of_resumed) < 1e-6
    exported = consolidated(tmp_path / "parts.ckpt")["state_dict"]
    assert difference(torch.load(whole, weights_only=True)["state_dict"], exported) < 1e-6
