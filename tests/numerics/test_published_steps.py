"""Steps that published modules take, in small: what micro-batches make of them, and what a refusal says."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MicroBatching
from tests.helpers.trainers import difference, fit


class Masked(pl.LightningModule):
    """Masks its weights in forward, as autoregressive layers do: the same whatever the batch is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 64).double()
        self.register_buffer("mask", (torch.rand(64, 8) > 0.5).double())
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        self.net.weight.data *= self.mask
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(96, 8, generator=generator).double()), batch_size=16)


class Shrinking(Masked):
    """What it writes depends on how often it does."""

    def __init__(self) -> None:
        super().__init__()
        self.mask *= 0.9


def test_weights_that_are_written_alike_whatever_the_batch_is() -> None:
    plain, ours = Masked(), Masked()
    fit(plain, max_epochs=2)
    fit(ours, MicroBatching(micro_batch_size=4), max_epochs=2)
    assert difference(plain, ours) < 1e-12
    assert sum(ours.sizes) == sum(plain.sizes)
    with pytest.raises(MisconfigurationException, match=r"sees: `net\.weight`"):
        fit(Shrinking(), MicroBatching(micro_batch_size=4), max_epochs=1)


class Packed(pl.LightningModule):
    """Packs its sequences, whose outputs are as long as the longest of the part, and masks the batch's width."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(4, 8, batch_first=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        packed = pack_padded_sequence(batch["x"], batch["n"], batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.net(packed)[0], batch_first=True)
        mask = torch.arange(batch["x"].shape[1])[None] < batch["n"][:, None]
        return ((outputs * mask[..., None]).sum(1) / batch["n"][:, None]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader:
        def collate(lengths: list[int]) -> dict[str, Tensor]:
            return {
                "x": pad_sequence([torch.ones(n, 4) for n in lengths], batch_first=True),
                "n": torch.tensor(lengths),
            }

        return DataLoader([6, 5, 3, 4, 2, 3, 3, 2], batch_size=8, collate_fn=collate)  # type: ignore[arg-type]


class PackedCut(Packed):
    """Cuts parts as wide as their longest sample."""

    def split_batch(self, batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
        columns = zip(batch["x"].split(sizes), batch["n"].split(sizes), strict=True)
        return [{"x": x[:, : int(n.max())], "n": n} for x, n in columns]

    def num_samples(self, batch: dict[str, Tensor]) -> int:
        return len(batch["n"])


def test_a_module_that_needs_the_longest_of_its_part_is_told_of_split_batch() -> None:
    with pytest.raises(MisconfigurationException, match=r"needs the longest of its samples.*`split_batch"):
        fit(Packed(), MicroBatching(micro_batch_size=4), max_epochs=1)
    torch.manual_seed(0)
    plain = Packed()
    torch.manual_seed(0)
    ours = PackedCut()
    fit(plain, max_epochs=2)
    fit(ours, MicroBatching(micro_batch_size=4), max_epochs=2)
    assert difference(plain, ours) < 1e-6
