"""`MicroBatching(last_resort="recompute")`: what happens when not even one sample fits."""

from collections.abc import Callable
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
from tests.helpers.fitting import out_of_memory
from tests.helpers.trainers import difference, fit, fit_on_two_ranks

WIDTH, ROWS, SAMPLES, NUM_BLOCKS = 64, 512, 4, 6
RECOMPUTED = "the activations of 6 more blocks recomputed in backward"


class Blocks(pl.LightningModule):
    """Six blocks whose activations are larger than everything else.

    Args:
        num_batches: Batches of an epoch.
    """

    def __init__(self, num_batches: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))
            for _ in range(NUM_BLOCKS)
        )
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.num_batches = num_batches

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(self.num_batches * SAMPLES, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        ranks = self.trainer.world_size
        sampler = DistributedSampler(TensorDataset(x), shuffle=False) if ranks > 1 else None
        return DataLoader(TensorDataset(x), SAMPLES // ranks, sampler=sampler)

    @property
    def recomputed(self) -> list[CheckpointedForward]:
        forwards = (vars(block).get("forward") for block in self.blocks)
        return [
            forward for forward in forwards if isinstance(forward, CheckpointedForward) and forward.choice == "full"
        ]


class Failing(Blocks):
    """Runs out of memory on one rank as long as a condition holds, from the second step on."""

    def __init__(self, lacks: Callable[["Failing"], bool], rank: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lacks = lacks
        self.rank = rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == self.rank and self.trainer.global_step and self.lacks(self):
            raise out_of_memory()
        return super().training_step(batch, batch_idx)


def is_plain(module: Failing) -> bool:
    return not module.recomputed


def reasons(callback: MicroBatching) -> list[str]:
    return [reason for _, _, reason in callback.changes[1:]]


def trained(module: Blocks, *callbacks: pl.Callback, **options: Any) -> Blocks:
    pl.seed_everything(3)
    fit(module, *callbacks, **options)
    return module


def recomputing(**options: Any) -> MicroBatching:
    return MicroBatching(micro_batch_size=1, last_resort="recompute", **options)


@pytest.fixture(scope="module")
def limit() -> int:
    """Bytes that one sample fits in only where all blocks are recomputed."""

    def peak_bytes(*callbacks: pl.Callback) -> int:
        limit = MemoryLimit("1GiB")
        fit(Blocks(), limit, MicroBatching(micro_batch_size=1), *callbacks)
        assert limit.ledger is not None
        return limit.ledger.peak_bytes

    plain, selective = peak_bytes(), peak_bytes(ActivationCheckpointing("selective", keep=["matmul"]))
    least = peak_bytes(ActivationCheckpointing())
    assert least < 0.9 * min(plain, selective)
    return (least + min(plain, selective)) // 2


@pytest.mark.nightly_cases("plain")
@pytest.mark.parametrize(
    "others", [[], [ActivationCheckpointing("selective", keep=["matmul"])]], ids=["plain", "selective"]
)
def test_blocks_are_recomputed_instead_of_ending_the_run(limit: int, others: list[pl.Callback]) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)one sample does not fit.*last_resort='recompute'"):
        fit(Blocks(), MemoryLimit(limit), MicroBatching(micro_batch_size=1), *others)
    ours = recomputing()
    module = trained(Blocks(), MemoryLimit(limit), ours, *others)
    assert reasons(ours) == [f"from now on with {RECOMPUTED}"]
    assert difference(module, trained(Blocks(), MicroBatching(micro_batch_size=1))) == 0
    assert all("forward" not in vars(block) for block in module.blocks)


@pytest.mark.nightly_cases("1")
@pytest.mark.parametrize("window", [1, 2])
def test_a_run_whose_first_trial_does_not_fit_begins_with_one_sample(limit: int, window: int) -> None:
    """The first batch of a window is repeated where the second one fails."""
    ours, options = MicroBatching(last_resort="recompute"), {"accumulate_grad_batches": window, "max_epochs": 1}
    module = trained(Blocks(num_batches=4), MemoryLimit(limit), ours, **options)
    assert "not even one sample fits" in ours.changes[0][2]
    assert reasons(ours) == [f"from now on with {RECOMPUTED}"]
    assert difference(module, trained(Blocks(num_batches=4), MicroBatching(micro_batch_size=1), **options)) == 0


def test_what_still_does_not_fit_ends_with_an_explanation(limit: int) -> None:
    module = Blocks()
    with pytest.raises(torch.OutOfMemoryError, match=f"(?s)even with {RECOMPUTED}.*The largest tensors"):
        trained(module, MemoryLimit(limit // 2), recomputing())
    assert not module.recomputed


def test_a_last_resort_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="`last_resort='swap'` is unknown. Choose from none, recompute."):
        MicroBatching(last_resort="swap")  # type: ignore[arg-type]


# --- on several ranks -------------------------------------------------------------------------------------------------


class SeesRecomputation(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: Failing) -> None:
        assert len(pl_module.recomputed) == NUM_BLOCKS


def test_all_ranks_recompute_if_one_needs_it(tmp_path: Path) -> None:
    callbacks = (MemoryLimit("1GiB"), recomputing(), SeesRecomputation())
    one, other = fit_on_two_ranks(Failing(is_plain, rank=1), tmp_path, *callbacks)
    assert difference(one[0], other[0]) == 0
