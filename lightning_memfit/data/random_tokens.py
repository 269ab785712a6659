"""`RandomTokens`: random token ids, for measuring speed and memory without any data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memfit.data.batched import at_least


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
        at_least(1, num_samples=num_samples, sequence_length=sequence_length, batch_size=batch_size)
        at_least(2, vocab_size=vocab_size, num_labels=num_labels)
        at_least(0, num_workers=num_workers)
        self.num_samples = num_samples
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.num_labels = num_labels
        self.num_workers = num_workers
        self.seed = seed
        self._samples: list[dict[str, torch.Tensor]] = []

    @override
    def setup(self, stage: str) -> None:
        """Draw the ids. A second call does nothing."""
        if not self._samples:
            number, classes = self.num_samples, self.num_labels
            generator = torch.Generator().manual_seed(self.seed)
            ids = torch.randint(self.vocab_size, (number, self.sequence_length), generator=generator)
            labels = ids if classes is None else torch.randint(classes, (number,), generator=generator)
            self._samples = [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Return all samples in order."""
        if not self._samples:
            raise RuntimeError("Call `setup` before asking for a loader.")
        return DataLoader(
            self._samples,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            generator=torch.Generator().manual_seed(self.seed),  # starting an epoch draws nothing of the run's
        )
