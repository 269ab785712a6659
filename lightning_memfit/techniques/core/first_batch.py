"""Read one real batch before training begins, without affecting the run that follows.

It is read in a process that is thrown away (`profile.process`), as reading may count, or use up a stream; where it
would write a file or ask another process, it is refused. That process has no device, as workers of a DataLoader have
none: data on one can't be read.

This reads `trainer.fit_loop._data_source` (Lightning 2.6), which has no public name:
`tests/contract/techniques/test_first_batch.py` fails if it moves.
"""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_memfit.profile.process import LostError, NoProcessError, RefusedError, run

_SECONDS = 120.0


def first_batch(trainer: Trainer) -> Any:
    """Read one batch of the training data, in another process.

    Raises:
        ValueError: If the data are not available yet, are empty, or can't be read without a change: what training gets
            must not depend on it.
    """
    try:
        found: list[Any] = run(partial(_read, trainer), _SECONDS, backward=False)
    except (LostError, NoProcessError, RefusedError) as error:
        raise ValueError(
            f"a batch can't be read before the run without changing what training gets: {str(error).rstrip('.')}."
        ) from error
    except RuntimeError as error:
        if not torch.cuda.is_initialized():
            raise
        raise ValueError(
            f"a batch can't be read before the run, in a process without a device: {str(error).rstrip('.')}."
        ) from error
    if not found:
        raise ValueError("the training data is empty.")
    return found[0]


def batches_per_epoch(trainer: Trainer) -> int | None:
    """Batches of an epoch as far as loader and Trainer tell before training begins; None if they don't."""
    try:
        length: float = run(lambda: len(_source(trainer)), _SECONDS, backward=False)
    except (Exception, RefusedError):  # a loader without a length, or a `train_dataloader` that can't be called yet
        length = float("inf")
    limit = trainer.limit_train_batches
    found = min(length, limit) if isinstance(limit, int) else length * limit
    return int(found) if found < float("inf") else None


def training_data_source(trainer: Trainer) -> Any:
    """The object whose method `dataloader` gives a Trainer its training loaders."""
    return trainer.fit_loop._data_source


def _read(trainer: Trainer) -> list[Any]:
    """A batch of a loader without workers, prefetching or pinned memory; empty without any."""
    source = _source(trainer)
    if isinstance(source, DataLoader):
        is_iterable = isinstance(source.dataset, torch.utils.data.IterableDataset)
        if is_iterable or source.batch_sampler is None:
            source = DataLoader(
                source.dataset,
                batch_size=source.batch_size,
                sampler=None if is_iterable else source.sampler,
                collate_fn=source.collate_fn,
                drop_last=source.drop_last,
            )
        else:
            source = DataLoader(source.dataset, batch_sampler=source.batch_sampler, collate_fn=source.collate_fn)
    return [batch for _, batch in zip(range(1), source, strict=False)]


def _source(trainer: Trainer) -> Any:
    try:
        return training_data_source(trainer).dataloader()
    except Exception as error:
        raise ValueError(
            f"the training data can't be had before the run: {type(error).__name__}: {error}. Give a DataLoader to "
            "`fit`, or a LightningDataModule."
        ) from error
