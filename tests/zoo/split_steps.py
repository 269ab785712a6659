"""Training steps whose batch is split: what the loss is over, what the step writes, and hooks of gradients."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.base import Case, Lit

FEATURES, CLASSES, LENGTH, BATCH, SAMPLES = 4, 5, 3, 6, 24


def numbers() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def loader(*columns: Tensor, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*columns), BATCH, **options)


def regression() -> DataLoader:
    inputs = torch.randn(SAMPLES, FEATURES, generator=numbers(), dtype=torch.float64)
    return loader(inputs, inputs.flip(1) ** 2)


def classes() -> DataLoader:
    inputs = torch.randn(SAMPLES, FEATURES, generator=numbers(), dtype=torch.float64)
    return loader(inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=numbers()))


def tokens() -> tuple[Tensor, Tensor]:
    """Token ids and labels of which some are -100, unevenly over the samples."""
    ids = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=numbers())
    kept = torch.rand(SAMPLES, LENGTH, generator=numbers()) < torch.linspace(0.2, 0.9, SAMPLES)[:, None]
    kept[:, 0] = True
    return ids, ids.roll(1, 1).masked_fill(~kept, -100)


class Toy(Lit):
    """Maps features to features; cases below change one thing about it."""

    make_loader: Callable[[], DataLoader] = staticmethod(regression)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES)).double()

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        return type(self).make_loader()


class Record:
    """Remembers calls where a repeated batch can't take them back as it does with attributes."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[Any] = []

    def append(self, item: Any) -> None:
        self._items.append(item)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class SumLoss(Toy):
    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.net(batch[0]), batch[1], reduction="sum")


class Contrastive(Toy):
    def loss(self, batch: Any) -> Tensor:
        scores = self.net(batch[0]) @ batch[1].T
        return functional.cross_entropy(scores, torch.arange(len(scores)))


class Normalised(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES).double()

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.net(self.norm(batch[0])), batch[1])


class Classes(Toy):
    make_loader = staticmethod(classes)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES).double()

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])


class ClassWeighted(Classes):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1])


class HiddenWeights(Classes):
    """The weights of classes stand where nobody can find them."""

    def loss(self, batch: Any) -> Tensor:
        weights = torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
        return functional.cross_entropy(self.net(batch[0]), batch[1], weights)


class WrongHook(HiddenWeights):
    def loss_weight(self, batch: Any) -> float:
        return len(batch[0])


class Tokens(Toy):
    """Labels of -100 in a tuple."""

    make_loader = staticmethod(lambda: loader(*tokens()))

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(CLASSES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()

    def labelled(self, ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(ids).transpose(1, 2), labels)

    def loss(self, batch: Any) -> Tensor:
        return self.labelled(*batch)


class Named(Tokens):
    @staticmethod
    def make_loader() -> DataLoader:
        ids, labels = tokens()
        rows = [{"ids": one, "answers": other} for one, other in zip(ids, labels, strict=True)]
        return DataLoader(rows, BATCH)

    def loss(self, batch: Any) -> Tensor:
        return self.labelled(batch["ids"], batch["answers"])


class Padded(Tokens):
    """Only what the module knows tells padding from tokens: the last token that is repeated."""

    @staticmethod
    def make_loader() -> DataLoader:
        ids = tokens()[0] % (CLASSES - 1)
        ids[torch.arange(LENGTH) > torch.arange(SAMPLES)[:, None] % LENGTH] = CLASSES - 1
        return loader(torch.cat([ids, torch.full((SAMPLES, 2), CLASSES - 1)], 1))

    def loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        return self.labelled(ids, ids.masked_fill(ids == CLASSES - 1, -100))


class FunctionalNorm(Toy):
    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.net(functional.batch_norm(batch[0], None, None, training=True)), batch[1])


class Balanced(Toy):
    """A term over the whole batch, as in mixtures of experts, is too small to show in the loss."""

    def loss(self, batch: Any) -> Tensor:
        out = self.net(batch[0])
        return functional.mse_loss(out, batch[1]) + 1e-3 * out.softmax(1).mean(0).square().sum()


class Dropping(Toy):
    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(functional.dropout(self.net(batch[0]), 0.5), batch[1])


class Counting(Toy):
    """Buffers updated in the step decide how much the loss counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        self.steps += 1
        return super().loss(batch) / self.steps


class RunningVariance(Toy):
    """Not the mean of anything that micro-batches write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.ones(FEATURES, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        loss = functional.mse_loss(self.net(batch[0] / self.variance), batch[1])
        self.variance.lerp_(batch[0].var(0), 0.1)
        return loss


class Queue(Toy):
    """Keeps the last samples, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(2 * BATCH, FEATURES, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.queue = torch.cat([self.queue[len(batch[0]) :], batch[0]])
        return loss


class QueueRead(Queue):
    """The second micro-batch would read the samples of the first."""

    def loss(self, batch: Any) -> Tensor:
        scores = self.net(batch[0]) @ self.queue.T
        return super().loss(batch) + scores.square().mean()


class Teacher(Toy):
    """A momentum teacher that is updated in the step, through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        for theirs, mine in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            theirs.data = theirs.data * 0.9 + mine.data * 0.1
        return super().loss(batch) + functional.mse_loss(self.net(batch[0]), self.teacher(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=0.01)


class Made(Toy):
    """An attribute that the first step makes."""

    def loss(self, batch: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().loss(batch) / self.calls


class Spectral(Toy):
    """Power iteration: every forward writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.parametrizations.spectral_norm(self.net[0])


class Kept(Toy):
    """Keeps losses and outputs in containers that forget some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = deque[float](maxlen=3)
        self.newest_first = deque[float](maxlen=3)
        self.trimmed: list[float] = []
        self.outputs: list[Tensor] = []
        self.all = ()
        self.pair = (0.0, 0.0)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        value = loss.item()
        self.last.append(value)
        self.newest_first.appendleft(value)
        self.trimmed = [*self.trimmed, value][-2:]
        self.outputs.clear()
        self.outputs.append(self.net(batch[0]).detach())
        self.all = (*self.all, value)
        self.pair = (value, value)
        return loss


class RelativeLoss(Toy):
    """Divides by the first loss: samples depend on each other from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.first is None:
            self.first = loss.detach()
        return loss * (loss.detach() / self.first)


class LeastLoss(Toy):
    """The mean of the least losses of micro-batches is the least of their mean in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor(1e9, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.least = torch.minimum(self.least, loss.detach())
        return loss


class Curriculum(Toy):
    """Goes up a level with each batch whose loss is low: every micro-batch would, by its own loss."""

    limit = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.level = 0

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        factor = 1 + 0.05 * self.level
        if loss < self.limit:
            self.level += 1
        return factor * loss


class Reading(Toy):
    """Reads numbers out of tensors as training steps do, and branches on them to no effect on what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped, self.low, self.positive, self.total = 0, 0, 0, 0.0
        self.mean = 0.0

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        assert not torch.isnan(loss).any()
        if torch.isinf(loss):
            self.skipped += 1
            return loss * 0
        if loss < 1.0:
            self.low += 1
        for value in batch[0][:, 0]:
            if value > 0:
                self.positive += 1
        self.total += float(batch[0].sum())
        weight = 1 + 0.1 * self.mean
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        self.log("loss", loss.item())
        return weight * loss


class Popping(Named):
    def loss(self, batch: Any) -> Tensor:
        return self.labelled(batch["ids"], batch.pop("answers"))


class InPlace(Toy):
    def loss(self, batch: Any) -> Tensor:
        batch[0].mul_(0.5)
        return super().loss(batch)


class Noisy(Toy):
    """Draws from a generator of its own, the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(11)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.rand((), generator=self.noise, dtype=torch.float64)


class HalvedGradients(Toy):
    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for parameter in self.net[2].parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


class RarelyClipped(Toy):
    """Edits gradients only where they are larger than those of the first batches."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if max(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None) > 1e3:
            nn.utils.clip_grad_norm_(self.parameters(), 1e3)


class HookOfSums(Toy):
    """Has hooks for accumulated gradients, which do nothing but look."""

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.hook)

    def hook(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        assert float(parameter.grad.mul(2).abs_().max()) < 1e3


class HalvesSums(HookOfSums):
    def hook(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


class ClampsSums(HookOfSums):
    """Clamps what is small enough already, past autograd and its version counters."""

    def hook(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.data[:1].clamp_(-1e3, 1e3)


class Shrinks(Toy):
    """Writes to its weights, from a step on."""

    start = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step >= self.start:
            with torch.no_grad():
                self.net[0].weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


class Clipped(Toy):
    """Clips its weights between forward and backward, past their versions."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for weight in self.net.parameters():
            weight.data.clamp_(-0.3, 0.3)


class Cleared(Toy):
    """A teacher and a number, which the step reads, follow between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.share = 0.0

    def loss(self, batch: Any) -> Tensor:
        found = self.net(batch[0])
        return functional.mse_loss(found, self.teacher(batch[0]) + batch[1]) + self.share * found.abs().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.share += 0.1
        for theirs, mine in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            theirs.data.mul_(0.8).add_(mine.data, alpha=0.2)


class ShrinksWhenCleared(Toy):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.net[0].weight.mul_(0.9)


class SomeMovedInputs(Toy):
    """Moves some inputs against the loss, by a backward pass that leaves gradients; not every micro-batch has any."""

    def loss(self, batch: Any) -> Tensor:
        chosen = batch[0][:, 0] > 1.0
        if not chosen.any():
            return super().loss(batch)
        inputs = batch[0][chosen].clone().requires_grad_()
        functional.mse_loss(self.net(inputs), batch[1][chosen]).backward()
        assert inputs.grad is not None
        moved = batch[0].clone()
        moved[chosen] += 0.1 * inputs.grad.sign()
        return functional.mse_loss(self.net(moved), batch[1])


class ClearsItself(Toy):
    """Clears gradients, all of them, though Lightning does so itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


class OwnWindow(Toy):
    """Adds up the gradients of two batches itself, and logs what has to be compared again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("worst", (self.net(batch[0]) - batch[1]).abs().max())
        return loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:  # type: ignore[override]
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class PaddedWithAToken(Toy):
    """Padding is a token like any other, rows that are full end in two equal tokens, and no part names its index."""

    pad = CLASSES - 1

    @staticmethod
    def make_loader() -> DataLoader:
        ids = torch.randint(1, CLASSES - 1, (SAMPLES, 8), generator=numbers())
        ids[1:BATCH, -2:] = ids[1:BATCH, -3:-2]  # in the first batch: two equal ones at the end of unpadded rows
        ids[BATCH::3, 4:] = PaddedWithAToken.pad
        ids[BATCH + 1 :: 3, -2:] = 1
        return loader(ids)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)).double()

    def loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        logits = self.net(ids[:, :-1]).transpose(1, 2)
        return functional.cross_entropy(logits, ids[:, 1:], ignore_index=self.pad)


class FirstMasked(Tokens):
    """A window begins with a batch that has nothing to learn from."""

    @staticmethod
    def make_loader() -> DataLoader:
        ids, labels = tokens()
        labels[:BATCH] = -100
        rows = [{"ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]
        return DataLoader(rows, BATCH)

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def loss(self, batch: Any) -> Tensor:
        return self.labelled(batch["ids"], batch["labels"])

    def on_before_backward(self, loss: Tensor) -> None:
        self.largest = max(self.largest, float(loss.detach().nan_to_num()))


def limited(kind: type[Curriculum], limit: float) -> type[Toy]:
    """A curriculum whose level goes up below this loss."""
    return type(f"{kind.__name__} at {limit}", (kind,), {"limit": limit})


EXACT = (
    *(SumLoss, ClassWeighted, Tokens, Counting, Teacher, Made, Spectral, Kept, Reading, Popping, InPlace),
    *(HookOfSums, Cleared, OwnWindow, PaddedWithAToken, FirstMasked),
)
UNSHOWN = (Padded, SomeMovedInputs, ClearsItself)
"""Left out of the contract: padding that nothing names, steps that change gradients."""

REFUSED = (
    *(Contrastive, Normalised, HiddenWeights, WrongHook, FunctionalNorm, Balanced),
    *(QueueRead, RunningVariance, RelativeLoss, LeastLoss, HalvedGradients, RarelyClipped),
    *(HalvesSums, ClampsSums, Shrinks, Clipped, ShrinksWhenCleared),
)
CURRICULA = (limited(Curriculum, limit) for limit in (0.5, 0.8))
CASES = (
    *(Case(kind.__name__, "", kind) for kind in EXACT),
    *(Case(kind.__name__, "", kind, "refused") for kind in REFUSED),
    *(Case(kind.__name__, "", kind, "either") for kind in (*UNSHOWN, *CURRICULA)),
    *(Case(kind.__name__, "", kind, "accepted") for kind in (Dropping, Noisy)),
)
