"""How batches look: containers, graphs, own classes, what has no batch dimension, batches that the step changes."""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.base import (
    BATCH,
    EVEN,
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
    uniform,
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


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Record:
    x: Tensor
    y: Tensor
    source: str = "here"


class Opaque:
    """Something that a batch carries along."""


class Columns(UserDict):
    """A mapping of its own."""


class Owned:
    """A class that only its author knows: it moves to devices, and has no length."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, *arguments: Any, **options: Any) -> "Owned":
        return Owned(self.x.to(*arguments, **options), self.y.to(*arguments, **options))


class Sliced(Owned):
    """The same with a length and slices."""

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Any) -> "Sliced":
        return Sliced(self.x[index], self.y[index])


class OwnedWithHooks(Laid):
    def split_batch(self, batch: Owned, sizes: list[int]) -> list[Owned]:
        return [Owned(x, y) for x, y in zip(batch.x.split(sizes), batch.y.split(sizes), strict=True)]

    def num_samples(self, batch: Owned) -> int:
        return len(batch.y)


def _tabular(x: Tensor, y: Tensor) -> Any:
    ids = [f"row {number}" for number in range(len(x))]
    return x[:, :2], x[:, 2:], y, Path("table.csv"), datetime(2024, 5, 1), Split.TRAIN, "train", ids


def _rows(x: Tensor, y: Tensor) -> Any:
    """As many paths and dates as samples."""
    return {
        "x": x,
        "y": y,
        "paths": [Path(f"{number}.png") for number in range(len(x))],
        "dates": [datetime(2024, 5, 1 + number) for number in range(len(x))],
    }


def _nested(x: Tensor, y: Tensor) -> Any:
    return {"inputs": {"left": x[:, :3], "more": [{"right": x[:, 3:]}]}, "targets": (y, None), "weight": 1.0}


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


class SameShapes(RaggedLists):
    """A list of tensors of one shape, a sample each: 8 x 6 in batches of 8."""

    def __init__(self) -> None:
        super().__init__()
        points = [floats(BATCH, FEATURES, seed=index) for index in range(EVEN)]
        self.data = list(zip(points, classes(EVEN).tolist(), strict=True))


# --- graphs ---------------------------------------------------------------------------------------------------------


@dataclass
class Graph:
    x: Tensor
    edges: Tensor
    y: Tensor


class Graphs:
    """Several graphs as one: nodes one after another, edges, and which graph a node belongs to."""

    def __init__(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> None:
        self.x, self.edge_index, self.batch, self.y = x, edge_index, batch, y

    @property
    def num_graphs(self) -> int:
        return len(self.y)

    @classmethod
    def of(cls, graphs: list[Graph]) -> Any:
        sizes = torch.tensor([len(graph.x) for graph in graphs])
        starts = sizes.cumsum(0) - sizes
        return cls(
            torch.cat([graph.x for graph in graphs]),
            torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=True)], 1),
            torch.arange(len(graphs)).repeat_interleave(sizes),
            torch.stack([graph.y for graph in graphs]),
        )

    def to(self, *arguments: Any, **options: Any) -> Any:
        return type(self)(*(one.to(*arguments, **options) for one in vars(self).values()))


class MappingOfGraphs(Graphs):
    """Like PyG's: `len` is the number of its attributes, which are found by name."""

    def keys(self) -> list[str]:
        return list(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        setattr(self, name, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).items())


class GraphNet(Lit):
    """One round of messages, a mean over each graph's nodes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.message, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        sizes = ints(2, 6, NUM_SAMPLES, seed=3).tolist()
        self.data = [
            Graph(floats(size, 4, seed=index), ints(0, size, 2, 2 * size, seed=index), torch.tensor(index % 3))
            for index, size in enumerate(sizes)
        ]

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        kinds = {"own": Graphs.of, "mapping": MappingOfGraphs.of, "dict": lambda graphs: vars(Graphs.of(graphs))}
        loader.collate_fn = kinds[self.kind]
        return loader

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, edges, of, y = batch.values() if isinstance(batch, dict) else vars(batch).values()
        hidden = self.message(x).tanh()
        hidden = hidden.index_add(0, edges[1], 0.5 * hidden[edges[0]])
        sizes = torch.bincount(of, minlength=len(y))
        pooled = hidden.new_zeros(len(y), 8).index_add(0, of, hidden) / sizes[:, None]
        loss = F.cross_entropy(self.head(pooled), y)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        return loss

    def samples_in(self, batch: Any) -> int:
        return len(batch["y"] if isinstance(batch, dict) else batch.y)


class GraphNetWithHooks(GraphNet):
    """The same, and how its batches are taken apart."""

    def num_samples(self, batch: Graphs) -> int:
        return batch.num_graphs

    def split_batch(self, batch: Graphs, sizes: list[int]) -> list[Graphs]:
        parts, start = [], 0
        for size in sizes:
            nodes = (batch.batch >= start) & (batch.batch < start + size)
            first = int(nodes.nonzero()[0])
            edges = batch.edge_index[:, nodes[batch.edge_index[0]]] - first
            parts.append(Graphs(batch.x[nodes], edges, batch.batch[nodes] - start, batch.y[start : start + size]))
            start += size
        return parts


class DenseGraphs(Lit):
    """Adjacency matrices (batch, nodes, nodes) with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        adjacency = (uniform(NUM_SAMPLES, 5, 5, seed=3) < 0.4).double()
        self.data = [
            {"x": x, "adjacency": a, "y": torch.tensor(i % 3)}
            for i, (x, a) in enumerate(zip(floats(NUM_SAMPLES, 5, 4, seed=4), adjacency, strict=True))
        ]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.message(batch["x"]).tanh()
        hidden = (hidden + batch["adjacency"] @ hidden).mean(1)
        loss = F.cross_entropy(self.head(hidden), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


# --- steps that change their batch ----------------------------------------------------------------------------------


class Popping(Laid):
    """The step takes the labels out of the batch."""

    def __init__(self) -> None:
        super().__init__(
            lambda x, y: {"inputs": x, "labels": y}, lambda batch: (), count=lambda batch: len(batch["inputs"])
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        loss = F.cross_entropy(self.net(input=batch["inputs"]), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class InPlace(Supervised):
    """The step normalises its inputs in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)


class InPlaceNested(Popping):
    """The step writes into the batch's dict and its tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["inputs"][:, 0] += 1.0
        batch["inputs"] = batch["inputs"] * 0.5
        batch["doubled"] = 2 * batch["inputs"]
        loss = F.cross_entropy(self.net(batch["inputs"] + batch["doubled"]), batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


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


def _with(**more: Any) -> Callable[[Tensor, Tensor], Any]:
    return lambda x, y: {"x": x, "y": y, **more}


def _xy(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["x"], batch["y"]


CASES = (
    Case("nested_dict", "dicts in lists in dicts, with None and a number", lambda: Laid(
        _nested,
        lambda b: (torch.cat([b["inputs"]["left"], b["inputs"]["more"][0]["right"]], 1), b["targets"][0]),
    )),
    Case("tabular_with_metadata", "tensors beside a Path, a date, an Enum, strings and ids", lambda: Laid(
        _tabular, lambda b: (torch.cat(b[:2], 1), b[2])
    )),
    Case("paths_per_sample", "lists of paths and dates, one per sample", lambda: Laid(_rows, _xy)),
    Case("dataclass", "a dataclass", lambda: Laid(Record, lambda b: (b.x, b.y))),
    Case("dataclass_in_list", "dataclasses in a list", lambda: Laid(
        lambda x, y: [Record(x, y), Record(x + 1, y)], lambda b: (b[0].x * b[1].x, b[1].y)
    )),
    Case("named_tuple", "a named tuple", lambda: Laid(Pair, lambda b: (b.x, b.y))),
    Case("ordered_dict", "an OrderedDict", lambda: Laid(lambda x, y: OrderedDict(x=x, y=y), _xy)),
    Case("own_mapping", "a `UserDict`", lambda: Laid(lambda x, y: Columns(x=x, y=y), _xy)),
    Case("with_none", "a dict with None", lambda: Laid(_with(mask=None), _xy)),
    Case("unknown_object", "a dict with an unknown object", lambda: Laid(_with(other=Opaque()), _xy)),
    Case("scalar_tensor", "a dict with a tensor without dimensions", lambda: Laid(_with(scale=torch.tensor(2.0)), _xy)),
    Case("one_number_per_batch", "a dict with a tensor of one number", lambda: Laid(_with(scale=torch.ones(1)), _xy)),
    Case("numpy_arrays", "numpy arrays", lambda: Laid(
        lambda x, y: {"x": x, "y": y, "ids": numpy.arange(len(x))},
        lambda b: (b["x"] + torch.tensor(b["ids"])[:, None] / 9, b["y"]),
    )),
    Case("numpy_only", "numpy arrays alone", lambda: Laid(
        lambda x, y: {"x": x.numpy(), "y": y.numpy()}, lambda b: (torch.from_numpy(b["x"]), torch.from_numpy(b["y"]))
    )),
    Case("views", "expanded and transposed tensors", lambda: Laid(
        lambda x, y: (x.T.contiguous().T, y, torch.zeros(1, 1).expand(len(x), 3)), lambda b: b[:2]
    )),
    Case("owned_class", "a class with `.to`, without a length", _owned(Owned), "either"),
    Case("owned_class_with_slices", "a class with `.to`, `len` and slices", _owned(Sliced), "either"),
    Case("owned_class_with_hooks", "the first with the module's `split_batch`", lambda: OwnedWithHooks(
        Owned, lambda batch: (batch.x, batch.y)
    )),
    Case("table_like_ragged_batch", f"a constant table of {RAGGED} rows, the last batch has {RAGGED} samples",
         lambda: Prototypes(RAGGED)),
    Case("table_like_batch", f"a constant table of {BATCH} rows in batches of {BATCH}",
         lambda: Prototypes(BATCH), "either"),
    Case("table_first", "a constant table of 11 rows before the inputs", lambda: Prototypes(11, "first")),
    Case("ragged_lists", f"lists of ragged tensors, some of {BATCH} rows", RaggedLists),
    Case("list_of_same_shapes", f"lists of tensors, all of {BATCH} rows", SameShapes, "either"),
    Case("graphs", "graphs in a class of its own", lambda: GraphNet("own"), "either"),
    Case("graphs_mapping", "graphs in a class like PyG's", lambda: GraphNet("mapping"), "either"),
    Case("graphs_dict", "graphs as a dict of tensors", lambda: GraphNet("dict"), "either"),
    Case("graphs_with_hooks", "graphs with the module's `split_batch`", lambda: GraphNetWithHooks("own")),
    Case("graphs_dense", "graphs as matrices", DenseGraphs),
    Case("popped_labels", '`batch.pop("labels")` in the step', Popping),
    Case("inputs_in_place", "`x.mul_(0.5)` in the step", InPlace),
    Case("shared_storage", "tensors that share memory, changed in place", SharedStorage),
    Case("batch_rewritten", "the step writes into the batch", InPlaceNested),
    Case("transfer_hook", "`on_after_batch_transfer` changes inputs in place", TransferHook),
)  # fmt: skip
