"""`MicroBatching(checkpoint_blocks=True)`: what happens when not even one sample fits."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_memfit.checkpointing.apply import CheckpointedForward
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.fitting import MicroBatching
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from tests.helpers.fitting import difference, fit, fit_on_two_ranks, out_of_memory

WIDTH, ROWS, SAMPLES = 32, 256, 4


class Blocks(pl.LightningModule):
    """Six blocks whose activations are larger than everything else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(6))
        self.blocks = nn.ModuleList(blocks)
        self.dropout = nn.Dropout(0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(2 * SAMPLES, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        ranks = self.trainer.world_size
        sampler = DistributedSampler(TensorDataset(x), shuffle=False) if ranks > 1 else None
        return DataLoader(TensorDataset(x), SAMPLES // ranks, sampler=sampler)

    @property
    def num_checkpointed(self) -> int:
        forwards = (vars(block).get("forward") for block in self.blocks)
        return sum(isinstance(forward, CheckpointedForward) and forward.choice == "full" for forward in forwards)


def peak_bytes(*callbacks: pl.Callback) -> int:
    limit = MemoryLimit("1GiB")
    fit(Blocks(), limit, MicroBatching(micro_batch_size=1), *callbacks)
    assert limit.ledger is not None
    return limit.ledger.peak_bytes


@pytest.fixture(scope="module")
def limit() -> int:
    """Bytes that one sample fits in only where all blocks are recomputed."""
    plain, selective = peak_bytes(), peak_bytes(ActivationCheckpointing("selective", keep=["matmul"]))
    least = peak_bytes(ActivationCheckpointing())
    assert least < 0.9 * min(plain, selective)
    return (least + min(plain, selective)) // 2


def undisturbed() -> Blocks:
    module = Blocks()
    pl.seed_everything(3)
    fit(module, MicroBatching(micro_batch_size=1))
    return module


@pytest.mark.parametrize(
    "others", [[], [ActivationCheckpointing("selective", keep=["matmul"])]], ids=["plain", "selective"]
)
def test_blocks_are_recomputed_instead_of_ending_the_run(limit: int, others: list[pl.Callback]) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="one sample does not fit"):
        fit(Blocks(), MemoryLimit(limit), MicroBatching(micro_batch_size=1), *others)
    module, ours = Blocks(), MicroBatching(micro_batch_size=1, checkpoint_blocks=True)
    pl.seed_everything(3)
    trainer = fit(module, MemoryLimit(limit), ours, *others)
    assert trainer.global_step == 4
    assert [reason for _, _, reason in ours.changes[1:]] == [
        "the activations of 6 more blocks are recomputed in backward from now on"
    ]
    assert difference(module, undisturbed()) == 0
    assert all("forward" not in vars(block) for block in module.blocks)


def test_what_still_does_not_fit_ends_with_an_explanation(limit: int) -> None:
    module = Blocks()
    with pytest.raises(torch.OutOfMemoryError, match="The largest tensors"):
        fit(module, MemoryLimit(limit // 2), MicroBatching(micro_batch_size=1, checkpoint_blocks=True))
    assert module.num_checkpointed == 0


class FailsOnRankOne(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.num_checkpointed < 6:
            raise out_of_memory()
        return super().training_step(batch, batch_idx)


class SeesBlocks(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: FailsOnRankOne) -> None:
        assert pl_module.num_checkpointed == 6


def test_all_ranks_recompute_where_one_ran_out(tmp_path: Path) -> None:
    callbacks = (MicroBatching(micro_batch_size=1, checkpoint_blocks=True), SeesBlocks())
    one, other = fit_on_two_ranks(FailsOnRankOne(), tmp_path, *callbacks)
    assert difference(one[0], other[0]) == 0
