"""What the zoo's modules share: a `Case`, its module with data of its own, and seeded numbers.

All numbers are float64 from the start: `precision="64-true"` converts containers of tensors, not every batch class.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH = 8
NUM_SAMPLES = 37  # five batches, the last of 5
EVEN = 40
FEATURES = 6
CLASSES = 5

Wanted = Literal["equal", "either", "refused", "accepted"]


class Lit(pl.LightningModule):
    """A module and its training data. Subclasses set `self.data` or override `train_dataloader`.

    Attributes:
        drop_last: Whether the ragged last batch is left out.
    """

    drop_last = False
    data: Any
    collate: Callable[[list[Any]], Any] | None = None

    def train_dataloader(self) -> Any:
        data = self.data if isinstance(self.data, Dataset) else Samples(self.data)
        return DataLoader(data, BATCH, collate_fn=type(self).collate, drop_last=self.drop_last)

    def configure_optimizers(self) -> Any:
        # Not Adam, which would hide a gradient that is wrong by a constant factor.
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def samples_in(self, batch: Any) -> int:
        """How many samples a batch or a part of one has: by the first tensor, unless a subclass knows better."""
        leaf = first_leaf(batch)
        if leaf is None:
            raise TypeError(f"{type(self).__name__} must define `samples_in` for a {type(batch).__name__}.")
        return len(leaf)


@dataclass(frozen=True)
class Case:
    """One kind of module or data.

    Attributes:
        name: Name for `--only` and tables.
        title: What it is, for the page.
        build: Makes the module, under a fixed seed.
        wanted: What the best callback would do. `equal`: nothing stands in the way of micro-batches, a refusal is
            needless. `either`: exact only with something that the module doesn't say. `refused`: there is nothing to
            make it exact. `accepted`: random numbers depend on how the batch is cut, so that runs can't be compared,
            but it must not be refused.
        trainer: Further arguments of the Trainer.
        micro_batching: Further arguments of `MicroBatching`.
        logs_tolerance: Relative difference that logged values may have; more where they are computed in float32.
        reference: Makes the module of the plain run if it is not the same one, and
        reference_trainer: its arguments of the Trainer. Values logged per loader batch aren't compared then.
    """

    name: str
    title: str
    build: Callable[[], pl.LightningModule]
    wanted: Wanted = "equal"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    micro_batching: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[], pl.LightningModule] | None = None
    reference_trainer: Mapping[str, Any] = field(default_factory=dict)
    logs_tolerance: float = 1e-9


class Samples(Dataset):
    """A list of samples."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def first_leaf(batch: Any) -> Any:
    """The first tensor of a batch that has dimensions, if it is a plain container."""
    if isinstance(batch, Tensor):
        return batch if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((leaf for leaf in map(first_leaf, batch) if leaf is not None), None)
    return None


# --- seeded numbers -------------------------------------------------------------------------------------------------


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ints(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def features(num: int = NUM_SAMPLES) -> Tensor:
    """Inputs of uneven size, so that no two samples have nearly the same loss."""
    return floats(num, FEATURES, seed=1) * (0.3 + 2 * uniform(num, 1, seed=2))


def classes(num: int = NUM_SAMPLES) -> Tensor:
    """Classes of uneven frequency."""
    return (uniform(num, seed=3) ** 2 * CLASSES).long()


# --- modules for which only the net or the loss is of interest ------------------------------------------------------


def mlp(out: int = CLASSES, inputs: int = FEATURES, width: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, out))


class Supervised(Lit):
    """A net on (inputs, targets), and a loss of its outputs, the targets and the inputs."""

    def __init__(
        self,
        net: nn.Module | None = None,
        loss: Callable[..., Tensor] = F.cross_entropy,
        data: tuple[Tensor, ...] | None = None,
        drop_last: bool = False,
        **hooks: Any,
    ) -> None:
        super().__init__()
        self.net = mlp() if net is None else net
        self.loss = loss
        self.data = TensorDataset(*(data or (features(), classes())))
        self.drop_last = drop_last
        for name, hook in hooks.items():
            setattr(self, name, hook)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, *targets = batch
        loss = self.loss(self.net(inputs), *targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss
