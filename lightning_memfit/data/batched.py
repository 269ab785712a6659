"""`BatchedSamples`: the base of every data module, from samples to loaders.

A loader's order is a pure function of seed, epoch and position, so that a resumed run sees the same batches
(`EffectiveBatchSampler`, `ResumableLoader`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypedDict

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from typing_extensions import override

from lightning_memfit.data.tokenization import load_tokenizer
from lightning_memfit.memory.replicas import num_replicas, ranks_together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# --- the resumable loader ---------------------------------------------------------------------------------------------


class Position(TypedDict):
    """Where in an epoch a loader is."""

    epoch: int
    batches: int
    """Batches of one process, as Lightning counts them."""
    samples: int
    """Samples of the epoch's order, over all processes."""
    data: dict[str, int]
    """`seed` and number of `samples`, on which the order depends."""


class EffectiveBatchSampler(DistributedSampler[Any]):
    """Shuffled indices of one process, in whole effective batches.

    Samples that do not fill the last effective batch of an epoch are left out, different ones in each epoch. Because it
    is a `DistributedSampler`, Lightning keeps it and sets its epoch.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, accumulation: int, num_replicas: int, rank: int, seed: int
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, drop_last=True)
        effective = batch_size * accumulation * num_replicas
        blocks = len(dataset)  # type: ignore[arg-type]
        if blocks < effective:
            raise ValueError(
                f"There are {blocks} training samples, less than one effective batch of {effective} "
                f"(`batch_size={batch_size}` x `accumulate_grad_batches={accumulation}` x {num_replicas} processes). "
                "Give more data, shorter samples or a smaller batch."
            )
        self.batch_size = batch_size
        self.samples_per_step = effective
        self.samples_per_batch = batch_size * num_replicas
        self.total_size = blocks // effective * effective
        self.num_samples = self.total_size // num_replicas
        self.begun_with = 0

    def steps_after(self, samples: int) -> int:
        """Return how many effective batches are left of an epoch after so many samples of it.

        Samples that no longer fill one are left out, as at the end of every epoch.
        """
        return max(0, len(self.dataset) - samples) // self.samples_per_step  # type: ignore[arg-type]

    def position_at(self, samples: int) -> Position:
        """Return the position after so many samples of this epoch, in batches of this sampler's size."""
        left = self.steps_after(samples) * self.samples_per_step
        return {
            "epoch": self.epoch,
            "batches": (self.total_size - left) // self.samples_per_batch,
            "samples": samples,
            "data": {"seed": self.seed, "samples": len(self.dataset)},  # type: ignore[arg-type]
        }

    @override
    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.dataset))  # type: ignore[arg-type]
        start = self.begun_with
        end = start + self.steps_after(start) * self.samples_per_step
        return iter(order[start + self.rank : end : self.num_replicas].tolist())


class ResumableLoader(DataLoader[Any]):
    """`DataLoader` over an `EffectiveBatchSampler` that continues in the middle of an epoch, at the sample.

    Lightning stores `state_dict` in checkpoints and calls `load_state_dict` before the first batch. The position is
    applied when the first batch is requested; by then Lightning has set the epoch. It counts samples over all
    processes, so that the run may go on with another batch size, accumulation or number of processes. With other data
    or another seed an epoch that was interrupted begins anew, with a warning that names what has changed.

    `on_resume` is called with a position and the numbers of batches of the present size that stand for it, and of an
    epoch; it returns whether that epoch goes on.
    """

    sampler: EffectiveBatchSampler

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: EffectiveBatchSampler,
        on_resume: Callable[[Position, int, int], bool] | None = None,
        **arguments: Any,
    ) -> None:
        # Its own generator: starting workers draws a number, which must not come from the run's random state.
        arguments.setdefault("generator", torch.Generator().manual_seed(sampler.seed))
        super().__init__(dataset, sampler=sampler, batch_size=sampler.batch_size, **arguments)
        self.on_resume = on_resume
        self._position = sampler.position_at(0)
        self._resume: Position | None = None

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler, resume = self.sampler, self._resume
        self._resume = None
        goes_on = resume is not None and resume["epoch"] == sampler.epoch
        sampler.begun_with = resume["samples"] if resume is not None and goes_on else 0
        self._position = sampler.position_at(sampler.begun_with)
        for batch in super().__iter__():
            self._position["batches"] += 1
            self._position["samples"] += sampler.samples_per_batch
            yield batch

    def state_dict(self) -> Position:
        """Return the epoch, the number of its batches and samples that were handed out so far, and of which data."""
        return {**self._position}

    def load_state_dict(self, state: Position) -> None:
        """Continue from a position in the next iteration, if that is of the same epoch and of these data."""
        before, now, changed = state["data"], self._position["data"], ""
        if before["seed"] != now["seed"]:
            changed = f"`seed` was {before['seed']} and is {now['seed']}"
        elif before["samples"] != now["samples"]:
            changed = f"there were {before['samples']:,} samples and are {now['samples']:,}"
        self._resume = None if changed else state
        goes_on = before["samples"] - state["samples"] >= self.sampler.samples_per_step
        if self.on_resume is not None:
            batches = 0 if changed else self.sampler.position_at(state["samples"])["batches"]
            goes_on &= self.on_resume(state, batches, len(self))
        if changed and goes_on:
            rank_zero_warn(
                f"The training data are not those of the checkpoint ({changed}). Its position in epoch "
                f"{state['epoch']}, after {state['samples']:,} samples, means nothing in them: the epoch's data "
                "begin anew, and samples that were seen in it may come again. Steps go on counting."
            )


# --- the data module --------------------------------------------------------------------------------------------------


class BatchedSamples(pl.LightningDataModule):
    """Samples of equal size, dealt out in whole effective batches. Subclasses make the samples.

    Args:
        batch_size: Samples in a micro-batch of one device.
        global_batch_size: Samples in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the samples kept for validation, chosen by their content.
        num_workers: Loader processes.
        seed: Seed for the order of the training samples.
        tokenizer: `bytes`, a local folder or a hub name; None if the samples have no tokens.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        batch_size: int = 8,
        global_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 2,
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()  # those of subclasses, too
        at_least(1, batch_size=batch_size)
        at_least(0, num_workers=num_workers)
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

    # --- samples ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def make_samples(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Return training and validation samples."""

    @override
    def setup(self, stage: str) -> None:
        """Check the batch sizes and make the samples. A second call does nothing."""
        self._check_global_batch_size()
        if self._train is None:
            self._train, self._val = self.make_samples()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, read once."""
        if self._tokenizer is None:
            assert self.tokenizer_name is not None
            self._tokenizer = load_tokenizer(self.tokenizer_name)
        return self._tokenizer

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None before `setup`, as in estimates, which have no need of a tokenizer."""
        return None if self._train is None or self.tokenizer_name is None else len(self.tokenizer)

    def example_tokens(self, length: int, vocab_size: int | None) -> torch.Tensor:
        """Return `(batch_size, length)` ids below the vocabulary, without special ones as far as they can be told."""
        self._check_global_batch_size()
        if self.batch_size * length > 1 << 26:
            raise ValueError(
                f"`batch_size={self.batch_size}` x {length} tokens are too many for a batch that is only looked at. "
                "Estimate a smaller one; `--micro-batch-size` says what another would need."
            )
        limit = min(vocab_size or 100, 1000)
        first = 3 if limit > 3 else 0
        return first + torch.arange(self.batch_size * length).view(self.batch_size, length) % (limit - first)

    # --- loaders ----------------------------------------------------------------------------------------------------

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of shuffled whole effective batches, which continues exactly at a checkpoint's position.

        It knows of processes and accumulation by the Trainer that the data module was given to (`datamodule=`). Called
        outside one, it is a loader for one process whose every micro-batch is a step.
        """
        accumulation, processes, rank = self._placement()
        samples = _ready(self._train)
        if self.trainer is not None and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            return self._in_order(samples)
        sampler = EffectiveBatchSampler(samples, self.batch_size, accumulation, processes, rank, self.seed)
        return ResumableLoader(samples, sampler, self._recount, **self._worker_arguments())

    def _recount(self, position: Position, batches: int, whole: int) -> bool:
        """Let Lightning count an epoch that it resumes in batches of the present size.

        It would compare the number of batches that were done with the epoch's length in batches of another size, and
        end the epoch too early. See `on_resume` of `ResumableLoader`.
        """
        if self.trainer is None:
            return True
        loop: Any = self.trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        if position["epoch"] != loop.epoch_progress.current.processed:
            return False  # it is over
        if progress.is_last_batch:
            batches = whole
        more = batches - position["batches"]
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, getattr(progress.current, name) + more)
        return not progress.is_last_batch

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
        """Return the validation samples in their own order, which is that of the predictions."""
        return self._in_order(_ready(self._val))

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


def at_least(low: int, **arguments: int | None) -> None:
    """Refuse arguments of a constructor that are below a number; None is not."""
    for name, value in arguments.items():
        if value is not None and value < low:
            raise ValueError(f"`{name}={value}` must be at least {low}.")


def _ready(samples: Dataset[Any] | None) -> Dataset[Any]:
    if samples is None:
        raise RuntimeError("Call `setup` before asking for a loader.")
    return samples
