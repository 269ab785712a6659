"""Images: normalisation layers, detection, segmentation, mixed samples."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    uniform,
)


def images(num: int = NUM_SAMPLES, size: int = 6, channels: int = 2) -> Tensor:
    return floats(num, channels, size, size, seed=1) * (0.3 + uniform(num, 1, 1, 1, seed=2))


def convolutions(norm: nn.Module | None = None, channels: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1), norm or nn.Identity(), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, CLASSES)
    )  # fmt: skip


def _with(norm: nn.Module) -> Supervised:
    return Supervised(convolutions(norm), data=(images(), classes()))


class OwnBatchNorm(nn.Module):
    """Statistics of the batch as a layer of SyncBatchNorm would gather them, without its name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("running", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        total, squares, count = x.sum(0), x.square().sum(0), len(x)
        mean = total / count
        self.running.mul_(0.9).add_(0.1 * mean.detach())
        return self.scale * (x - mean) / (squares / count - mean.square() + 1e-3).sqrt()


class FrozenBatchNorm(Supervised):
    def __init__(self) -> None:
        super().__init__(convolutions(nn.BatchNorm2d(4)), data=(images(), classes()))

    def on_train_start(self) -> None:
        self.net[1].eval()


class Detector(Lit):
    """A list of images of uneven size, and a list of dicts with as many boxes as each has."""

    def __init__(self, mean_over: str) -> None:
        super().__init__()
        self.net = nn.Conv2d(2, 5, 3, padding=1)
        self.mean_over = mean_over
        sizes, counts = ints(4, 9, NUM_SAMPLES, 2, seed=1).tolist(), ints(1, 4, NUM_SAMPLES, seed=2).tolist()
        self.data = [
            (
                floats(2, *sizes[index], seed=index),
                {
                    "boxes": floats(count, 4, seed=100 + index),
                    "labels": ints(0, 3, count, seed=index),
                    "image_id": index,
                },
            )
            for index, count in enumerate(counts)
        ]

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        return [image for image, _ in samples], [target for _, target in samples]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = []
        for image, target in zip(*batch, strict=True):
            out = self.net(image[None]).mean((2, 3))
            box = (out[:, :4] - target["boxes"]).square().sum(1)
            losses.append(box + (out[:, 4] - target["labels"]).square())
        loss = torch.cat(losses).mean() if self.mean_over == "boxes" else torch.stack([x.mean() for x in losses]).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return {"loss": loss, "num_boxes": sum(map(len, losses))}

    def samples_in(self, batch: Any) -> int:
        return len(batch[0])


class Mixup(Supervised):
    """Each sample is mixed with another one of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        other = torch.randperm(len(x))
        out = self.net(0.7 * x + 0.3 * x[other])
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[other])


class Adversarial(Lit):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = mlp(FEATURES), mlp(1)
        self.data = features()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.generator, self.critic)]

    def training_step(self, x: Tensor, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (-1, 1), strict=True):
            loss = sign * (self.critic(self.generator(x)).mean() - self.critic(x).mean())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def _pixels() -> Tensor:
    """Classes of pixels, 255 where unknown."""
    return ints(0, 3, NUM_SAMPLES, 6, 6, seed=4).masked_fill(uniform(NUM_SAMPLES, 6, 6, seed=5) < 0.4, 255)


CASES = (
    Case("image_side_is_batch_size", "8 channels of 8 x 8 pixels in batches of 8", lambda: Supervised(
        convolutions(channels=BATCH), data=(images(EVEN, BATCH, BATCH), classes(EVEN))
    )),
    Case("group_norm", "GroupNorm", lambda: _with(nn.GroupNorm(2, 4))),
    Case("instance_norm_running", "InstanceNorm with running statistics", lambda: _with(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    ), "either"),
    Case("batch_norm_1d", "BatchNorm1d", lambda: Supervised(
        nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.Linear(12, CLASSES))
    ), "refused"),
    Case("batch_norm_frozen", "BatchNorm2d in evaluation mode", FrozenBatchNorm),
    Case("own_batch_norm", "a layer of one's own like SyncBatchNorm", lambda: Supervised(
        nn.Sequential(nn.Linear(FEATURES, 12), OwnBatchNorm(12), nn.Linear(12, CLASSES))
    ), "refused"),
    Case("detection", "lists of images and of dicts, mean over images", lambda: Detector("images")),
    Case("detection_by_boxes", "the same, mean over all boxes", lambda: Detector("boxes"), "either"),
    Case("segmentation", "pixels of class 255 are ignored", lambda: Supervised(
        nn.Conv2d(2, 3, 3, padding=1), lambda out, y: F.cross_entropy(out, y, ignore_index=255), (images(), _pixels())
    ), "either"),
    Case("dropout", "dropout", lambda: Supervised(
        nn.Sequential(nn.Linear(FEATURES, 12), nn.Dropout(0.3), nn.Linear(12, CLASSES))
    ), "accepted"),
    Case("mixup", "samples mixed with others of the batch, by `randperm`", Mixup, "refused"),
    Case("adversarial", "two optimizers, manual optimization", Adversarial, "refused"),
)  # fmt: skip
