"""`RandomTokens`: random token ids, for measuring speed and memory without any data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override


class RandomTokens(pl.LightningDataModule):
    """Random token ids with random classes, or with the ids themselves as labels of a language model.

    Args:
        num_samples: Samples of one epoch.
        sequence_length: Tokens in a sample.
        batch_size: Samples in a micro-batch of one device.
        vocab_size: Number of token ids; all ids are below it.
        num_labels: Classes of a sequence classifier. Null: `labels` are the ids, as for causal language models.
        num_workers: Loader processes.
        seed: Seed of ids and classes.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        num_samples: int = 512,
        sequence_length: int = 512,
        batch_size: int = 4,
        vocab_size: int = 30000,
        num_labels: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for argument, value, low in (
            ("num_samples", num_samples, 1),
            ("sequence_length", sequence_length, 1),
            ("batch_size", batch_size, 1),
            ("vocab_size", vocab_size, 2),
            ("num_labels", 2 if num_labels is None else num_labels, 2),
            ("num_workers", num_workers, 0),
        ):
            if value < low:
                raise ValueError(f"`{argument}={value}` must be at least {low}.")
        self.num_samples = num_samples
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.num_labels = num_labels
        self.num_workers = num_workers
        self.seed = seed
        self._samples: RandomSamples | None = None

    @override
    def setup(self, stage: str) -> None:
        """Draw the ids. A second call does nothing."""
        if self._samples is None:
            shape = (self.num_samples, self.sequence_length)
            self._samples = RandomSamples(shape, self.vocab_size, self.num_labels, self.seed)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Return all samples in order."""
        if self._samples is None:
            raise RuntimeError("Call `setup` before asking for a loader.")
        return DataLoader(
            self._samples,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            generator=torch.Generator().manual_seed(self.seed),  # starting an epoch leaves the run's random state alone
        )


class RandomSamples(Dataset[Any]):
    """Samples with `input_ids` and `labels`, drawn once from a generator of their own."""

    def __init__(self, shape: tuple[int, int], vocab_size: int, num_labels: int | None, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(vocab_size, shape, generator=generator)
        self.labels = self.ids if num_labels is None else torch.randint(num_labels, (shape[0],), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}
