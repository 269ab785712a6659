"""A module of repeated blocks that fails at any moment one asks for, trained by FSDP2 on several ranks."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.strategies import FullyShardedStrategy
from tests.helpers import ranks
from tests.helpers.fitting import VOCABULARY, Sentences, is_checking, out_of_memory
from tests.helpers.trainers import quiet_trainer

SECONDS = timedelta(seconds=120)
"""How long a collective of the tests waits."""


class Moments:
    """Counts moments of a run, by what happens in them, and fails in some.

    Args:
        rank: Which rank fails.
        where: What happens then: a kind of moment, or empty for any.
        numbers: Which of these moments, counted from 1.
        fail: What is done then; raises, or ends the process.
    """

    __slots__ = ("count", "fail", "failures", "numbers", "rank", "where")  # which a repeated batch can't take back

    def __init__(self, rank: int, where: str, numbers: Any, fail: Callable[[], None]) -> None:
        self.rank, self.where, self.numbers, self.fail = rank, where, set(numbers), fail
        self.count = self.failures = 0

    def __deepcopy__(self, memo: Any) -> "Moments":
        return self

    def reached(self, kind: str, rank: int) -> None:
        if is_checking() or (self.where and kind != self.where):
            return
        self.count += 1
        if rank == self.rank and self.count in self.numbers:
            self.failures += 1
            self.fail()


def never() -> Moments:
    return Moments(-1, "", (), lambda: None)


def run_out_of_memory() -> None:
    raise out_of_memory()


def break_down() -> None:
    raise ValueError("no such column")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Passing(torch.autograd.Function):
    """Passes a tensor on, and tells of the moment in which backward arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.module.tell("backward")
        return grads[0], None


class Block(nn.Module):
    """A residual block that tells of what happens in it."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
        self.tell = tell

    def forward(self, x: Tensor) -> Tensor:
        self.tell("forward" if torch.is_grad_enabled() else "validation")
        hidden = torch.tanh(self.one(x))
        if torch.is_grad_enabled():
            hidden = _Passing.apply(hidden, self)
            self.tell("forward")
        return x + self.two(hidden)


class Tagger(pl.LightningModule):
    """Predicts each token's label from itself, by the mean over unmasked labels, in three blocks."""

    def __init__(self, moments: Moments | None = None, batch_size: int = 8, num_samples: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moments = never() if moments is None else moments
        blocks = [Block(self.tell) for _ in range(3)]
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 8), *blocks, nn.Linear(8, VOCABULARY))
        self.batch_size = batch_size
        self.dataset = Sentences(num_samples or 3 * batch_size * ranks.num_ranks)

    def tell(self, kind: str) -> None:
        self.moments.reached(kind, self.global_rank)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["input_ids"]).transpose(1, 2), batch["labels"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.tell("training step")
        loss = self._loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.tell("loss")
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.tell("validation step")
        self.log("val_loss", self._loss(batch), sync_dist=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: self.tell("before step"))
        optimizer.register_step_post_hook(lambda *_: self.tell("step"))
        return optimizer

    def _loader(self) -> DataLoader:
        return DataLoader(self.dataset, self.batch_size, sampler=DistributedSampler(self.dataset, shuffle=False))

    train_dataloader = val_dataloader = _loader


def train(module: Tagger, *callbacks: pl.Callback, strategy: dict[str, Any] | None = None, **options: Any) -> Any:
    """Train on this process's rank.

    Returns:
        The weights in whole, what was logged, and the seconds that training took.
    """
    world_size = ranks.num_ranks
    sharded = FullyShardedStrategy(process_group_backend="gloo", timeout=SECONDS, **(strategy or {}))
    options = {"strategy": sharded, "devices": world_size, "use_distributed_sampler": False, **options}
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    begin = time.monotonic()
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(module)
    weights = {name: whole(p) for name, p in module.named_parameters()}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights, logged, time.monotonic() - begin


def whole(parameter: Tensor) -> Tensor:
    """The values of a parameter over all ranks."""
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def fail(where: str, number: int, action: Callable[[], None], rank: int = 1, **options: Any) -> Any:
    """Train with a failure in one moment."""
    size = options.pop("micro_batch_size", 4)
    return train(Tagger(Moments(rank, where, (number,), action)), MicroBatching(micro_batch_size=size), **options)


def close(one: Any, other: Any) -> float:
    """The largest difference of weights and of what was logged."""
    differences = [float((one[0][name] - other[0][name]).abs().max()) for name in one[0]]
    with suppress(ValueError):
        differences.append(max(abs(one[1][name] - other[1][name]) for name in one[1]))
    return max(differences)


class TellOfLayers(pl.Callback):
    """Tells of forward and backward of every layer of a module that doesn't do so itself."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        def tell(kind: str) -> None:
            self._moments.reached(kind, trainer.global_rank)

        def before(module: nn.Module, args: Any) -> None:
            tell("forward")

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: tell("backward"))

        for layer in pl_module.modules():
            if not any(layer.children()):
                layer.register_forward_pre_hook(before)
                layer.register_forward_hook(after)
