"""Read one real batch before training begins, without affecting the run that follows.

This reads `trainer.fit_loop._data_source` (Lightning 2.6), which has no public name:
`tests/unit/techniques/test_first_batch.py` fails if it moves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader


def first_batch(trainer: Trainer) -> Any:
    """Read one batch of the training data through a separate iterator, in this process.

    All random generators, including those of the loader and its sampler, are restored.

    Raises:
        ValueError: If the data are not available yet, or are an iterator, which reading would use up.
    """
    with isolate_rng():
        try:
            source = training_data_source(trainer).dataloader()
        except Exception as error:
            raise ValueError(
                f"the training data can't be had before the run: {type(error).__name__}: {error}. Give a DataLoader to "
                "`fit`, or a LightningDataModule."
            ) from error
        if not isinstance(source, DataLoader):
            return _first(source)
        with _kept_generators(source):
            if isinstance(source.dataset, torch.utils.data.IterableDataset):
                _refuse_iterators(source.dataset)
            return _first(_in_this_process(source))


def batches_per_epoch(trainer: Trainer) -> int | None:
    """Batches of an epoch as far as loader and Trainer tell before training begins; None if they don't."""
    try:
        length: float = len(training_data_source(trainer).dataloader())
    except Exception:  # a loader without a length, or a user's `train_dataloader` that can't be called yet
        length = float("inf")
    limit = trainer.limit_train_batches
    found = min(length, limit) if isinstance(limit, int) else length * limit
    return int(found) if found < float("inf") else None


def training_data_source(trainer: Trainer) -> Any:
    """The object whose method `dataloader` gives a Trainer its training loaders."""
    return trainer.fit_loop._data_source


def _in_this_process(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader without workers, prefetching or pinned memory."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset) or loader.batch_sampler is None:
        sampler = {} if isinstance(loader.dataset, torch.utils.data.IterableDataset) else {"sampler": loader.sampler}
        return DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            **sampler,  # type: ignore[arg-type]
        )
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)


def _first(source: Any) -> Any:
    _refuse_iterators(source)
    for batch in source:
        return batch
    raise ValueError("the training data is empty.")


def _refuse_iterators(source: Any) -> None:
    if hasattr(source, "__next__"):
        raise ValueError(
            f"the training data is an iterator ({type(source).__name__}), and reading a batch would use it up. Give "
            "something that can be iterated over anew, such as a DataLoader."
        )


@contextmanager
def _kept_generators(loader: DataLoader[Any]) -> Iterator[None]:
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    states = [generator.get_state() for generator in found.values()]
    try:
        yield
    finally:
        for generator, state in zip(found.values(), states, strict=True):
            generator.set_state(state)
