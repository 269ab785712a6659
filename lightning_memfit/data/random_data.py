"""`RandomTensors` and `RandomTokens`: random batches, for measuring speed and memory without any data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_memfit.data.batched import BatchedSamples, at_least

Specs = Mapping[str, tuple[tuple[int, ...], int | None]]
"""Shape of a sample, and the bound of integers, by name."""


class RandomTensors(BatchedSamples):
    """Random tensors of given shapes: images with their classes, spectrograms with their transcripts, or your own.

    Args:
        tensors: By their names in a batch, `shape` of a sample, and `below` for integers from 0 on; floats are normally
            distributed. For example `{pixel_values: {shape: [3, 224, 224]}, labels: {shape: [], below: 10}}`.
        num_samples: Samples for training, and a quarter of them, at least one batch, for validation.
        batch_size: Samples in a micro-batch of one device.
        global_batch_size: Samples in an optimizer step, accumulation and all devices included. Null: not checked.
        num_workers: Loader processes.
        seed: Seed of values and order.

    Raises:
        ValueError: If a number or a shape is out of range.
    """

    def __init__(
        self,
        tensors: dict[str, dict[str, Any]],
        num_samples: int = 64,
        batch_size: int = 4,
        global_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, global_batch_size, num_workers=num_workers, seed=seed)
        if num_samples < batch_size:
            raise ValueError(f"`num_samples={num_samples}` must be at least `batch_size={batch_size}`.")
        self.num_samples = num_samples
        self.specs = _checked(tensors)

    @override
    def make_samples(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Make samples that are drawn when they are asked for."""
        held_out = max(self.batch_size, self.num_samples // 4)
        return RandomSample(self.specs, self.num_samples, self.seed), RandomSample(self.specs, held_out, self.seed + 1)

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """Return a training batch, each tensor `(batch_size, *shape)`, by their names; `vocab_size` is not needed."""
        samples = RandomSample(self.specs, self.batch_size, self.seed)
        rows = [samples[index] for index in range(self.batch_size)]
        return {name: torch.stack([row[name] for row in rows]) for name in self.specs}


class RandomSample(Dataset[dict[str, torch.Tensor]]):
    """So many samples that follow from a seed and their index."""

    def __init__(self, specs: Specs, length: int, seed: int) -> None:
        self.specs = specs
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return {
            name: torch.randn(shape, generator=generator)
            if below is None
            else torch.randint(below, shape, generator=generator)
            for name, (shape, below) in self.specs.items()
        }


def _checked(tensors: Mapping[str, Any]) -> Specs:
    """Return shape and bound of every tensor."""
    if not tensors:
        raise ValueError("`tensors` is empty. Name at least one, for example `{x: {shape: [3]}}`.")
    specs = {}
    for name, spec in tensors.items():
        shape, below = (spec.get("shape"), spec.get("below")) if isinstance(spec, Mapping) else (None, None)
        sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else [0]
        if not all(type(size) is int and size > 0 for size in sizes) or set(spec) - {"shape", "below"}:
            raise ValueError(f"`tensors.{name}={spec!r}` must have a `shape`, a list of sizes, and may have `below`.")
        if below is not None and (type(below) is not int or below < 1):
            raise ValueError(f"`tensors.{name}.below={below!r}` must be a whole number of at least 1.")
        specs[name] = (tuple(sizes), below)
    return specs


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
