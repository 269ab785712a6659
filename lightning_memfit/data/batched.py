"""`BatchedText`: the base of every text data module, from samples to loaders.

A loader's order is a pure function of seed, epoch and position, so that a resumed run sees the same batches
(`EffectiveBatchSampler`, `ResumableLoader`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from typing_extensions import override

from lightning_memfit.data.tokenization import load_tokenizer
from lightning_memfit.memory.replicas import num_replicas, ranks_together

# --- the resumable loader ---------------------------------------------------------------------------------------------


class EffectiveBatchSampler(DistributedSampler[Any]):
    """Shuffled indices of one process, in whole effective batches.

    Samples that do not fill the last effective batch of an epoch are left out, different ones in each epoch. Because it
    is a `DistributedSampler`, Lightning keeps it and sets its epoch.

    Args:
        dataset: The data set that is indexed.
        batch_size: Micro-batch of one process.
        accumulation: Micro-batches of one optimizer step.
        num_replicas: Number of processes.
        rank: Index of this process.
        seed: Seed of the order.

    Raises:
        ValueError: If the data do not fill one effective batch.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, accumulation: int, num_replicas: int, rank: int, seed: int
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, drop_last=True)
        effective = batch_size * accumulation * num_replicas
        blocks = len(dataset)  # type: ignore[arg-type]
        if blocks < effective:
            raise ValueError(
                f"The training text has {blocks} blocks, less than one effective batch of {effective} "
                f"(`batch_size={batch_size}` x `accumulate_grad_batches={accumulation}` x {num_replicas} processes). "
                "Give more text, a shorter sequence or a smaller batch."
            )
        self.batch_size = batch_size
        self.total_size = blocks // effective * effective
        self.num_samples = self.total_size // num_replicas
        self.start_batch = 0

    @override
    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.dataset))  # type: ignore[arg-type]
        mine = order[self.rank : self.total_size : self.num_replicas]
        return iter(mine[self.start_batch * self.batch_size :].tolist())


class ResumableLoader(DataLoader[Any]):
    """`DataLoader` over an `EffectiveBatchSampler` that continues in the middle of an epoch.

    Lightning stores `state_dict` in checkpoints and calls `load_state_dict` before the first batch. The position is
    applied when the first batch is requested; by then Lightning has set the epoch.
    """

    sampler: EffectiveBatchSampler

    def __init__(self, dataset: Dataset[Any], sampler: EffectiveBatchSampler, **arguments: Any) -> None:
        # Its own generator: starting workers draws a number, which must not come from the run's random state.
        arguments.setdefault("generator", torch.Generator().manual_seed(sampler.seed))
        super().__init__(dataset, sampler=sampler, batch_size=sampler.batch_size, **arguments)
        self._position = {"epoch": 0, "batches": 0}
        self._resume: dict[str, int] | None = None

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, resume = self.sampler.epoch, self._resume
        self._resume = None
        start = resume["batches"] if resume is not None and resume["epoch"] == epoch else 0
        self._position = {"epoch": epoch, "batches": start}
        self.sampler.start_batch = start
        for batch in super().__iter__():
            self._position["batches"] += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its batches that were handed out so far."""
        return dict(self._position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position in the next iteration, if that is of the same epoch."""
        self._resume = dict(state)


# --- the data module --------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BatchedText(pl.LightningDataModule):
    """Samples of equal length, dealt out in whole effective batches. Subclasses make the samples.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        batch_size: Samples in a micro-batch of one device.
        global_batch_size: Samples in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the documents kept for validation, chosen by their content.
        num_workers: Loader processes.
        seed: Seed for the order of the training samples.

    Raises:
        ValueError: If a number is out of range, or the tokenizer cannot be read.
    """

    def __init__(
        self,
        tokenizer: str,
        batch_size: int,
        global_batch_size: int | None,
        val_fraction: float,
        num_workers: int,
        seed: int,
    ) -> None:
        super().__init__()
        for argument, value, low in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
            if value < low:
                raise ValueError(f"`{argument}={value}` must be at least {low}.")
        if not 0 < val_fraction < 1:
            raise ValueError(f"`val_fraction={val_fraction}` must lie between 0 and 1.")
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.seed = seed
        self.tokenizer_name = tokenizer
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._train: Dataset[Any] | None = None
        self._val: Dataset[Any] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, read once."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_name)
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.tokenizer)

    @abstractmethod
    def make_samples(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Return training and validation samples."""

    @override
    def setup(self, stage: str) -> None:
        """Check the batch sizes and make the samples. A second call does nothing."""
        self._check_global_batch_size()
        if self._train is None:
            self._train, self._val = self.make_samples()

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of shuffled whole effective batches, which continues exactly at a checkpoint's position."""
        accumulation, processes, rank = self._placement()
        samples = _ready(self._train)
        if self.trainer is not None and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            return self._in_order(samples)
        sampler = EffectiveBatchSampler(samples, self.batch_size, accumulation, processes, rank, self.seed)
        return ResumableLoader(samples, sampler, **self._worker_arguments())

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        """Return validation samples in a fixed shuffled order, so that `limit_val_batches` draws from all the text."""
        samples = _ready(self._val)
        order = np.random.default_rng(self.seed).permutation(len(samples))  # type: ignore[arg-type]
        return self._in_order(Subset(samples, order.tolist()))

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        """Return the validation samples: there is no third split."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the validation samples."""
        return self.val_dataloader()

    def _in_order(self, samples: Dataset[Any]) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)  # starting workers must not touch the run's random state
        return DataLoader(samples, batch_size=self.batch_size, generator=generator, **self._worker_arguments())

    def _worker_arguments(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "pin_memory": torch.cuda.is_available(),
            "persistent_workers": self.num_workers > 0,
        }

    def _placement(self) -> tuple[int, int, int]:
        """Return micro-batches per step, how many processes have their own samples, and the rank among them."""
        if self.trainer is None:
            return 1, 1, 0
        rank = self.trainer.global_rank // ranks_together(self.trainer)
        return self.trainer.accumulate_grad_batches, num_replicas(self.trainer), rank

    def _check_global_batch_size(self) -> None:
        accumulation, processes, _ = self._placement()
        wanted, per_pass = self.global_batch_size, self.batch_size * processes
        if wanted is None or self.trainer is None or wanted == per_pass * accumulation:
            return
        if wanted % per_pass:
            fix = f"{wanted} is not a multiple of {per_pass}: choose another `batch_size`"
        else:
            fix = f"Set `trainer.accumulate_grad_batches: {wanted // per_pass}`"
        raise ValueError(
            f"`global_batch_size={wanted}`, but `batch_size={self.batch_size}` x `accumulate_grad_batches="
            f"{accumulation}` x {processes} devices is {per_pass * accumulation}. {fix}."
        )


def _ready(samples: Dataset[Any] | None) -> Dataset[Any]:
    if samples is None:
        raise RuntimeError("Call `setup` before asking for a loader.")
    return samples
