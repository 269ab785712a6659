"""Loaders and the Trainer's options: accumulation, clipping, schedules, samplers, several loaders, skipped batches."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.zoo.base import (
    BATCH,
    CLASSES,
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
)


class TwoGroups(Supervised):
    """Two groups of parameters with AdamW, and a rate that changes with every step."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[0].parameters(), "lr": 1e-3}, {"params": self.net[2].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 2e-2], total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByLoss(Supervised):
    """The rate falls when the logged loss of an epoch doesn't."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"}}


class Newton(Supervised):
    """An optimizer that calls its closure several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OwnClipping(Supervised):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        for index, parameter in enumerate(self.parameters()):
            torch.nn.utils.clip_grad_norm_(parameter, 0.05 * (1 + index))


class OwnBackward(Supervised):
    """`backward` is the module's own."""

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        (0.5 * loss).backward(*arguments, **options)


class OwnOptimizerStep(Supervised):
    """The rate warms up by hand, and gradients are kept as zeros."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.global_step + 1) / 5)
        optimizer.step(closure=closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Averaged(Supervised):
    """Lightning's callback keeps an average of the weights."""

    def configure_callbacks(self) -> Any:
        return [EMAWeightAveraging(decay=0.8)]


class SparseGradients(Lit):
    """A table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8, sparse=True), nn.Linear(8, CLASSES)
        self.data = TensorDataset(ints(0, 30, NUM_SAMPLES, 4, seed=4), classes())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.table(batch[0]).mean(1)), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Recomputed(Supervised):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = checkpoint(self.net[:2], batch[0], use_reentrant=False)
        loss = F.cross_entropy(self.net[2](hidden), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Branches(Supervised):
    """Heads that only some samples use, and some batches not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(mlp(1) for _ in range(CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        for index in y.unique().tolist():
            loss = loss + self.heads[index](x[y == index]).square().sum() / len(x)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Fetching(Supervised):
    """The step fetches its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Validated(Supervised):
    """Validation between epochs, and a hook that logs."""

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(features(13) + 0.1, classes(13)), BATCH)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_epoch_end(self) -> None:
        self.log("weight", self.net[0].weight.norm())


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(features(), classes(), strict=True)


class Batches(IterableDataset):
    """Whole batches, of uneven size."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        total = sum(self.sizes)
        yield from zip(features(total).split(self.sizes), classes(total).split(self.sizes), strict=True)


class FromStream(Supervised):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), BATCH)


class FromBatches(Supervised):
    """A loader of whole batches: `batch_size=None`."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self) -> Any:
        return DataLoader(Batches(self.sizes), batch_size=None)


class UnevenSampler:
    """Batches of uneven size, as by a limit of tokens."""

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in (8, 3, 7, 8, 6, 5):
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return 6


class FromSampler(Supervised):
    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_sampler=UnevenSampler())


class Shuffled(Supervised):
    def train_dataloader(self) -> Any:
        return DataLoader(self.data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


class TwoLoaders(Lit):
    """Two loaders side by side, of equal or of different batch sizes."""

    def __init__(self, sizes: tuple[int, int], mode: str, as_list: bool = False) -> None:
        super().__init__()
        self.net, self.other = mlp(), mlp(1)
        self.sizes, self.mode, self.as_list = sizes, mode, as_list

    def train_dataloader(self) -> Any:
        first = DataLoader(TensorDataset(features(), classes()), self.sizes[0])
        second = DataLoader(TensorDataset(floats(NUM_SAMPLES, FEATURES, seed=7)), self.sizes[1])
        return CombinedLoader([first, second] if self.as_list else {"first": first, "second": second}, self.mode)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, y), (z,) = batch if self.as_list else batch.values()
        loss = F.cross_entropy(self.net(x), y) + self.other(z).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        return loss


class Skipping(Supervised):
    """Some batches are skipped: by their index, or by what is in them."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 5 == 1 if self.by == "index" else batch[0].mean() < -0.05:
            return None
        return super().training_step(batch, batch_idx)


class Hooked(Supervised):
    """Hooks of the module that see the loss and the outputs of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        return {"loss": loss, "out": out.detach(), "correct": (out.argmax(1) == batch[1]).sum()}

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("loss_before_backward", loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict(
            {"loss": outputs["loss"], "out": outputs["out"].square().mean(), "rows": float(len(outputs["out"]))}
        )


class Gradients(Supervised):
    """The norm of the gradients is logged before the optimizer's step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = torch.stack([p.grad.norm() for p in self.parameters()])
        self.log_dict({"gradient": norms.norm(), "largest": norms.max()})


class Windows(Supervised):
    """Batches of a size of its own: one loader batch, or a whole window of `accumulate_grad_batches`."""

    def __init__(self, num: int, batch_size: int) -> None:
        super().__init__(data=(features(num), classes(num)))
        self.size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, self.size)


CASES = (
    Case("even_batches", "eight samples in every batch", lambda: Supervised(data=(features(EVEN), classes(EVEN)))),
    Case("ragged_last_batch", f"{NUM_SAMPLES} samples in batches of {BATCH}", Supervised),
    Case("two_groups_one_cycle", "AdamW, two groups, OneCycleLR", TwoGroups),
    Case("reduce_on_plateau", "ReduceLROnPlateau by the logged loss", ByLoss),
    Case("lbfgs", "LBFGS", Newton),
    Case("clip_norm", "gradients clipped by norm", Supervised, trainer={"gradient_clip_val": 0.1}),
    Case(
        "clip_value",
        "gradients clipped by value",
        Supervised,
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    Case("own_clipping", "`configure_gradient_clipping` of the module", OwnClipping),
    Case("own_backward", "`backward` of the module", OwnBackward),
    Case("own_optimizer_step", "`optimizer_step` and `optimizer_zero_grad` of the module", OwnOptimizerStep),
    Case("weight_averaging", "Lightning's EMAWeightAveraging", Averaged),
    Case("sparse_gradients", "sparse gradients", SparseGradients),
    Case("checkpointed", "activations recomputed by `checkpoint`", Recomputed),
    Case("branches", "heads that only some samples use", Branches),
    Case("dataloader_iter", "a step that fetches its batches", Fetching, "refused"),
    Case(
        "accumulate_even",
        "`accumulate_grad_batches=3`, even windows",
        lambda: Windows(48, BATCH),
        trainer={"accumulate_grad_batches": 3},
    ),
    Case(
        "accumulate_ragged",
        "`accumulate_grad_batches=3`, ragged windows, against the whole window at once",
        lambda: Windows(37, BATCH),
        trainer={"accumulate_grad_batches": 3},
        reference=lambda: Windows(37, 3 * BATCH),
    ),
    Case("validated", "validation, and a hook that logs", Validated, trainer={"limit_val_batches": 2}),
    Case("iterable", "IterableDataset", FromStream),
    Case("batch_size_none", "a loader of whole batches", lambda: FromBatches(8, 8, 8, 8, 5)),
    Case("batch_size_none_uneven", "a loader of whole batches of uneven size", lambda: FromBatches(8, 3, 7, 8, 6)),
    Case("uneven_sampler", "a batch sampler with uneven sizes", FromSampler),
    Case("shuffled", "a shuffled loader", Shuffled),
    Case("two_loaders", "two loaders of equal batch size", lambda: TwoLoaders((8, 8), "min_size")),
    Case("two_loaders_list", "the same as a list", lambda: TwoLoaders((8, 8), "min_size", as_list=True)),
    Case(
        "two_loaders_different",
        "two loaders of different batch size",
        lambda: TwoLoaders((8, 6), "max_size_cycle"),
        "either",
    ),
    Case("skips_by_index", "None from the step for some batches", lambda: Skipping("index")),
    Case("skips_by_content", "None from the step by the batch's mean", lambda: Skipping("content"), "refused"),
    Case("outputs_in_hooks", "hooks that see loss and outputs", Hooked),
    Case("gradient_norm_logged", "the gradients' norm is logged", Gradients),
)
