"""A run that goes on with other batches, processes or workers sees each sample once an epoch."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from lightning_memfit.data.batched import BatchedSamples
from lightning_memfit.data.text import PackedBlocks
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

SAMPLES = 48

Setting = tuple[int, int, int, int]
"""Batch size, accumulation, processes, loader workers."""


class Numbers(BatchedSamples):
    """Blocks whose first token is their number."""

    def __init__(self, batch_size: int, num_workers: int, seed: int) -> None:
        super().__init__(batch_size, num_workers=num_workers, seed=seed)

    def make_samples(self):
        blocks = PackedBlocks(np.repeat(np.arange(SAMPLES, dtype=np.uint16), 2), 2)
        return blocks, blocks


class Sees(LightningModule):
    """Writes the epoch and number of every sample that it trains on."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layer = torch.nn.Linear(2, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def training_step(self, batch, batch_idx):
        with (self.folder / f"{self.global_rank}.txt").open("a") as file:
            file.writelines(f"{self.current_epoch} {number}\n" for number in batch["input_ids"][:, 0].tolist())
        return self.layer(batch["input_ids"].float()).square().mean()


class SavesAt(Callback):
    """Save after so many batches of the run's part, and stop."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def part(
    folder: Path, setting: Setting, batches: int | None, path: Path | None, to: Path | None, seed: int = 3
) -> None:
    """Run a part of a training, in processes of its own if there are several."""
    folder.mkdir(exist_ok=True)
    if setting[2] == 1:
        run_part(folder, setting, batches, path, to, seed)
        return
    ended = run_ranks(run_part, setting[2], folder / "ranks", folder, setting, batches, path, to, seed)
    assert [one.code for one in ended] == [0] * setting[2], ended[0].output[-2000:]


def run_part(
    folder: Path, setting: Setting, batches: int | None, path: Path | None, to: Path | None, seed: int
) -> None:
    """In each process."""
    batch_size, accumulation, processes, workers = setting
    callbacks = [] if batches is None else [SavesAt(batches, to)]
    trainer = quiet_trainer(
        *callbacks,
        devices=processes,
        max_epochs=2,
        accumulate_grad_batches=accumulation,
        use_distributed_sampler=False,
    )
    trainer.fit(Sees(folder), datamodule=Numbers(batch_size, workers, seed), ckpt_path=path, weights_only=False)


def seen(folder: Path) -> Counter:
    lines = [line for file in folder.rglob("[0-9].txt") for line in file.read_text().splitlines()]
    return Counter(tuple(map(int, line.split())) for line in lines)


ONCE = Counter(itertools.product(range(2), range(SAMPLES)))

PAIRS: list[tuple[Setting, int, Setting]] = [
    ((4, 1, 1, 0), 6, (8, 1, 1, 0)),  # more than half of the epoch: Lightning's count exceeds the new length
    ((8, 1, 1, 0), 3, (4, 1, 1, 0)),
    ((8, 1, 1, 0), 5, (2, 2, 1, 0)),
    ((2, 4, 1, 0), 20, (4, 4, 1, 0)),  # 8 samples are left: they fill no step of 16
    ((3, 2, 1, 0), 8, (1, 6, 1, 0)),
    ((4, 1, 1, 0), 12, (8, 1, 1, 0)),  # at the epoch's end
    ((4, 1, 1, 0), 4, (8, 1, 1, 2)),
    ((4, 2, 1, 2), 4, (2, 2, 1, 2)),
    ((4, 1, 1, 0), 4, (4, 1, 2, 0)),
    ((4, 1, 2, 0), 3, (4, 1, 1, 0)),
    ((2, 2, 1, 2), 8, (4, 1, 2, 0)),
    ((2, 1, 2, 0), 6, (4, 2, 2, 0)),
]


@pytest.mark.parametrize(("first", "batches", "then"), PAIRS)
def test_each_sample_once_an_epoch(tmp_path, first, batches, then):
    path = tmp_path / "at.ckpt"
    part(tmp_path / "first", first, batches, None, path)
    part(tmp_path / "then", then, None, path, None)
    counts = seen(tmp_path)
    assert not counts - ONCE, "samples were repeated"
    left_out = ONCE - counts
    step = then[0] * then[1] * then[2]
    done = batches * first[0] * first[2]
    assert sum(left_out.values()) == (SAMPLES - done) % step
    assert all(epoch == 0 for epoch, _ in left_out), "an epoch after the change is whole"


def test_after_two_changes(tmp_path):
    paths = [tmp_path / "1.ckpt", tmp_path / "2.ckpt"]
    part(tmp_path / "a", (4, 1, 1, 0), 3, None, paths[0])
    part(tmp_path / "b", (2, 2, 1, 0), 4, paths[0], paths[1])
    part(tmp_path / "c", (1, 4, 1, 2), None, paths[1], None)
    assert seen(tmp_path) == ONCE


@pytest.mark.parametrize("then", [(4, 1, 1, 0), (2, 2, 1, 0)])
@pytest.mark.parametrize("batches", [1, 5, 11])
def test_another_order_begins_the_epoch_anew(tmp_path, batches, then):
    path = tmp_path / "at.ckpt"
    part(tmp_path / "first", (4, 1, 1, 0), batches, None, path)
    with pytest.warns(UserWarning, match=r"not those of the checkpoint \(`seed` was 3 and is 4\)"):
        part(tmp_path / "then", then, None, path, None, seed=4)
    assert seen(tmp_path / "then") == ONCE


def test_another_order_from_the_next_epoch_on_is_no_change(tmp_path, recwarn):
    path = tmp_path / "at.ckpt"
    part(tmp_path / "first", (4, 1, 1, 0), 12, None, path)
    part(tmp_path / "then", (4, 1, 1, 0), None, path, None, seed=4)
    assert seen(tmp_path) == ONCE
    assert not [one for one in recwarn if "not those of the checkpoint" in str(one.message)]
