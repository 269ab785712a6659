"""A loader whose order is a pure function of seed, epoch and position, so that a resumed run sees the same batches."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class EffectiveBatchSampler(DistributedSampler):
    """Shuffled indices of one process, in whole effective batches.

    What would make the last effective batch of an epoch smaller is left out, other blocks each epoch. Being a
    `DistributedSampler`, it is kept by Lightning, which tells it the epoch.

    Args:
        dataset: What is indexed.
        batch_size: Micro-batch of one process.
        accumulation: Micro-batches of one optimizer step.
        num_replicas: Number of processes.
        rank: Which of them this is.
        seed: Of the order.

    Raises:
        ValueError: If the data do not fill one effective batch.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, accumulation: int, num_replicas: int, rank: int, seed: int
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

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.dataset))  # type: ignore[arg-type]
        mine = order[self.rank : self.total_size : self.num_replicas]
        return iter(mine[self.start_batch * self.batch_size :].tolist())


class ResumableLoader(DataLoader):
    """`DataLoader` over an `EffectiveBatchSampler` that continues in the middle of an epoch.

    Lightning stores `state_dict` in checkpoints and calls `load_state_dict` before the first batch. The position is
    looked up when the first batch is asked for, by when Lightning has set the epoch.
    """

    sampler: EffectiveBatchSampler

    def __init__(self, dataset: Dataset, sampler: EffectiveBatchSampler, **arguments: Any) -> None:
        # Its own generator: starting workers draws a number, which must not come from the run's random state.
        arguments.setdefault("generator", torch.Generator().manual_seed(sampler.seed))
        super().__init__(dataset, sampler=sampler, batch_size=sampler.batch_size, **arguments)
        self._position = {"epoch": 0, "batches": 0}
        self._resume: dict[str, int] | None = None

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
        """Epoch, and the batches of it handed out so far."""
        return dict(self._position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position in the next iteration, if it is of the same epoch."""
        self._resume = dict(state)
