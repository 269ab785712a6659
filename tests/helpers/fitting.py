"""Data and modules for the tests of micro-batch fitting: uneven sentences, and a module that runs out of memory."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_memfit.fitting.step.noise import SameNoise

VOCABULARY = 11
MASKED = -100


class Sentences(Dataset):
    """Token sequences of uneven length, padded on the right, some labels masked, one sample without any label."""

    def __init__(self, num_samples: int = 48, length: int = 6) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, VOCABULARY, (num_samples, length), generator=generator)
        self.sizes = torch.randint(2, length + 1, (num_samples,), generator=generator)
        padding = torch.arange(length)[None] >= self.sizes[:, None]
        self.ids[padding] = 0
        self.labels = self.ids.masked_fill(padding | (torch.rand(self.ids.shape, generator=generator) < 0.2), MASKED)
        self.labels[5] = MASKED  # a micro-batch of one has nothing to learn from

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index], "index": torch.tensor(index)}


class Tagger(pl.LightningModule):
    """Predicts each token's label from itself, by the mean over unmasked labels."""

    def __init__(self, dropout: float = 0.0, batch_size: int = 16, num_samples: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, VOCABULARY)
        )
        self.batch_size = batch_size
        self.dataset = Sentences(num_samples)
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch["input_ids"]).transpose(1, 2), batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.seen += batch["index"].tolist()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        world_size = self.trainer.world_size
        sampler = DistributedSampler(self.dataset, shuffle=False) if world_size > 1 else None
        return DataLoader(self.dataset, self.batch_size, sampler=sampler)


def out_of_memory() -> torch.OutOfMemoryError:
    """The error a CUDA device raises."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (injected).")


class FailInBackward(torch.autograd.Function):
    """Adds nothing to a loss and fails in backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise out_of_memory()


class Tally:
    """Counts calls and errors, where a repeated batch can't take them back as it does with attributes of a module."""

    __slots__ = ("count", "failures")

    def __init__(self) -> None:
        self.count = self.failures = 0


def is_checking() -> bool:
    """Whether this call of `training_step` is part of the comparison before the first split."""
    return any(isinstance(mode, SameNoise) for mode in _get_current_dispatch_mode_stack())


class Failing(Tagger):
    """Runs out of memory where told to.

    Args:
        where: `forward`, `middle` (of forward, after logging), `backward`, `before step` or `step` (weights changed).
        calls: At which calls of `training_step`, or of the optimizer step.
        rank: On which rank.
    """

    def __init__(self, where: str, calls: Any, rank: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.where = where
        self.calls = set(calls)
        self.rank = rank
        self.tally = Tally()

    @property
    def failures(self) -> int:
        return self.tally.failures

    def _is_due(self, where: str) -> bool:
        due = self.where == where and self.global_rank == self.rank and self.tally.count in self.calls
        due = due and not is_checking()
        self.tally.failures += due
        return due

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.training and torch.is_grad_enabled() and "step" not in self.where and not is_checking():
            self.tally.count += 1
        if self._is_due("forward"):
            raise out_of_memory()
        loss = super().training_step(batch, batch_idx)
        if self._is_due("middle"):
            raise out_of_memory()
        return FailInBackward.apply(loss) if self._is_due("backward") else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()

        def fail(*_: Any) -> None:
            self.tally.count += 1
            if self._is_due(self.where):
                raise out_of_memory()

        if self.where == "step":
            optimizer.register_step_post_hook(fail)  # all weights are updated by then
        elif self.where == "before step":
            optimizer.register_step_pre_hook(fail)
        return optimizer


class TwiceSGD(torch.optim.SGD):
    """Takes the gradient at weights a little away, as SAM does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in weights]
        with torch.no_grad():
            for weight, move in zip(weights, moves, strict=True):
                weight.add_(move)
            closure()
            for weight, move in zip(weights, moves, strict=True):
                weight.sub_(move)
        super().step()
        return loss
