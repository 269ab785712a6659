"""How batches look: containers, own classes, what has no batch dimension, batches that the step changes."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.base import (
    BATCH,
    FEATURES,
    NUM_SAMPLES,
    Case,
    Lit,
    Supervised,
    classes,
    features,
    floats,
    ints,
    mlp,
)

RAGGED = NUM_SAMPLES % BATCH


class Laid(Lit):
    """A classifier whose batches a function builds from inputs and classes, and a function takes apart in the step."""

    def __init__(
        self,
        build: Callable[[Tensor, Tensor], Any],
        take: Callable[[Any], tuple[Tensor, Tensor]],
        num: int = NUM_SAMPLES,
        count: Callable[[Any], int] | None = None,
    ) -> None:
        super().__init__()
        self.net = mlp()
        self.build, self.take = build, take
        self.count = count or (lambda batch: len(take(batch)[1]))
        self.data = list(zip(features(num), classes(num), strict=True))

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        build = self.build
        loader.collate_fn = lambda samples: build(*(torch.stack(column) for column in zip(*samples, strict=True)))
        return loader

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.take(batch)
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        return loss

    def samples_in(self, batch: Any) -> int:
        return self.count(batch)


# --- containers -----------------------------------------------------------------------------------------------------


class Split(Enum):
    TRAIN = "train"


@dataclass
class Record:
    x: Tensor
    y: Tensor
    source: str = "here"


class Opaque:
    """Something that a batch carries along."""


class Owned:
    """A class that only its author knows: it moves to devices, and has no length."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, *arguments: Any, **options: Any) -> "Owned":
        return Owned(self.x.to(*arguments, **options), self.y.to(*arguments, **options))


class OwnedWithHooks(Laid):
    def split_batch(self, batch: Owned, sizes: list[int]) -> list[Owned]:
        return [Owned(x, y) for x, y in zip(batch.x.split(sizes), batch.y.split(sizes), strict=True)]

    def num_samples(self, batch: Owned) -> int:
        return len(batch.y)


def _tabular(x: Tensor, y: Tensor) -> Any:
    ids = [f"row {number}" for number in range(len(x))]
    return x[:, :2], x[:, 2:], y, Path("table.csv"), datetime(2024, 5, 1), Split.TRAIN, "train", ids


def _owned(kind: Any) -> Any:
    return lambda: Laid(kind, lambda batch: (batch.x, batch.y))


# --- what has no batch dimension ------------------------------------------------------------------------------------


class Prototypes(Laid):
    """Scores against a constant table that the batch brings, of any number of rows."""

    def __init__(self, rows: int, at: str = "last", num: int = NUM_SAMPLES) -> None:
        table = floats(rows, FEATURES, seed=5)
        build = (lambda x, y: (table, x, y)) if at == "first" else (lambda x, y: {"x": x, "y": y, "table": table})
        super().__init__(build, lambda batch: (), num)
        self.at = at
        self.scores = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, table = (batch["x"], batch["y"], batch["table"]) if self.at == "last" else (batch[1], batch[2], batch[0])
        scores = self.scores(x) @ table.T  # the number of rows of the table changes the loss
        loss = scores.logsumexp(1).square().mean() + F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        return loss

    def samples_in(self, batch: Any) -> int:
        return len(batch["y"] if self.at == "last" else batch[2])


class RaggedLists(Lit):
    """Each sample has points of its own number; the first of every batch has as many as the batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        counts = ints(1, 7, NUM_SAMPLES, seed=3).tolist()
        counts[::BATCH] = [BATCH] * len(counts[::BATCH])
        points = [floats(count, FEATURES, seed=index) for index, count in enumerate(counts)]
        self.data = list(zip(points, classes().tolist(), strict=True))

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        points, labels = zip(*samples, strict=True)
        return {"points": list(points), "classes": list(labels)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = torch.stack([self.net(points).mean(0) for points in batch["points"]])
        loss = F.cross_entropy(out, torch.tensor(batch["classes"]))
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(out))
        return loss

    def samples_in(self, batch: Any) -> int:
        return len(batch["points"])


# --- steps that change their batch ----------------------------------------------------------------------------------


class InPlaceNested(Laid):
    """The step writes into the batch's dict and its tensors."""

    def __init__(self) -> None:
        super().__init__(
            lambda x, y: {"inputs": x, "labels": y}, lambda batch: (), count=lambda batch: len(batch["inputs"])
        )

    def loss_of(self, batch: Any) -> Tensor:
        batch["inputs"][:, 0] += 1.0
        batch["inputs"] = batch["inputs"] * 0.5
        batch["doubled"] = 2 * batch["inputs"]
        return F.cross_entropy(self.net(batch["inputs"] + batch["doubled"]), batch["labels"])


class SharedStorage(Laid):
    """Two tensors of a batch are one piece of memory; the step changes it by one of them and reads it by the other."""

    def __init__(self) -> None:
        super().__init__(lambda x, y: {"x": x, "start": x[:, :3], "y": y}, _xy)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["start"].mul_(0.1)
        return super().training_step(batch, batch_idx)


class TransferHook(Supervised):
    """`on_after_batch_transfer` scales the inputs in place: once for each batch, not for each part."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].mul_(0.5), *batch[1:]]


def _xy(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["x"], batch["y"]


CASES = (
    Case("tabular_with_metadata", "tensors beside a Path, a date, an Enum, strings and ids", lambda: Laid(
        _tabular, lambda b: (torch.cat(b[:2], 1), b[2])
    )),
    Case("dataclass", "a dataclass", lambda: Laid(Record, lambda b: (b.x, b.y))),
    Case("numpy_arrays", "numpy arrays", lambda: Laid(
        lambda x, y: {"x": x, "y": y, "ids": numpy.arange(len(x))},
        lambda b: (b["x"] + torch.tensor(b["ids"])[:, None] / 9, b["y"]),
    )),
    Case("owned_class", "a class with `.to`, without a length", _owned(Owned), "either"),
    Case("owned_class_with_hooks", "the first with the module's `split_batch`", lambda: OwnedWithHooks(
        Owned, lambda batch: (batch.x, batch.y)
    )),
    Case("table_like_ragged_batch", f"a constant table of {RAGGED} rows, the last batch has {RAGGED} samples",
         lambda: Prototypes(RAGGED)),
    Case("table_like_batch", f"a constant table of {BATCH} rows in batches of {BATCH}",
         lambda: Prototypes(BATCH), "either"),
    Case("table_first", "a constant table of 11 rows before the inputs", lambda: Prototypes(11, "first")),
    Case("ragged_lists", f"lists of ragged tensors, some of {BATCH} rows", RaggedLists),
    Case("shared_storage", "tensors that share memory, changed in place", SharedStorage),
    Case("batch_rewritten", "the step writes into the batch", InPlaceNested),
    Case("transfer_hook", "`on_after_batch_transfer` changes inputs in place", TransferHook),
)  # fmt: skip
