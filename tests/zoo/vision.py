"""Images: normalisation layers, detection, segmentation, generative models."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

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


class FunctionalBatchNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, training=True)


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


class Autoencoder(Lit):
    """A variational autoencoder; its noise comes with the sample, or from the global generator."""

    def __init__(self, own_noise: bool) -> None:
        super().__init__()
        self.encode, self.decode = mlp(6), mlp(FEATURES, 3)
        self.own_noise = own_noise
        self.data = TensorDataset(features(), floats(NUM_SAMPLES, 3, seed=9))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, noise = batch
        mean, log_variance = self.encode(x).chunk(2, 1)
        noise = noise if self.own_noise else torch.randn_like(mean)
        out = self.decode(mean + noise * (log_variance / 2).exp())
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        reconstruction = (out - x).square().sum(1).mean()
        self.log_dict({"kl": kl, "reconstruction": reconstruction}, on_step=True, on_epoch=True)
        return reconstruction + 0.1 * kl


class Diffusion(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(FEATURES, FEATURES + 1)
        self.data = features()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        time, noise = torch.rand(len(x), 1, dtype=x.dtype), torch.randn_like(x)
        noisy = x * (1 - time) + noise * time
        return (self.net(torch.cat([noisy, time], 1)) - noise).square().mean()


class Mixup(Supervised):
    """Each sample is mixed with another one of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        other = torch.randperm(len(x))
        out = self.net(0.7 * x + 0.3 * x[other])
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[other])


class Cutmix(Supervised):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        mixed = x.clone()
        mixed[..., :3] = x.flip(0)[..., :3]
        out = self.net(mixed)
        return (F.cross_entropy(out, y) + F.cross_entropy(out, y.flip(0))) / 2


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


class BatchDeviation(nn.Module):
    """The deviation over the batch as one more feature, as in progressive GANs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.var(0, unbiased=False).mean().expand(len(x), 1)], 1)


def _batch_dice(out: Tensor, y: Tensor) -> Tensor:
    probability, target = out.sigmoid().flatten(), y.flatten()
    return 1 - 2 * (probability * target).sum() / (probability.sum() + target.sum())


def _dice_per_image(out: Tensor, y: Tensor) -> Tensor:
    probability, target = out.sigmoid().flatten(1), y.flatten(1)
    return (1 - (2 * (probability * target).sum(1) + 1) / (probability.sum(1) + target.sum(1) + 1)).mean()


def _pixels() -> Tensor:
    """Classes of pixels, 255 where unknown."""
    return ints(0, 3, NUM_SAMPLES, 6, 6, seed=4).masked_fill(uniform(NUM_SAMPLES, 6, 6, seed=5) < 0.4, 255)


def _masks() -> Tensor:
    return (uniform(NUM_SAMPLES, 1, 6, 6, seed=4) < uniform(NUM_SAMPLES, 1, 1, 1, seed=5)).double()


def _spectral() -> nn.Module:
    parametrize = nn.utils.parametrizations
    return nn.Sequential(
        parametrize.spectral_norm(nn.Linear(FEATURES, 12)), nn.Tanh(), parametrize.spectral_norm(nn.Linear(12, CLASSES))
    )


def _weight_norm() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 12)), nn.Tanh(), nn.Linear(12, CLASSES)
    )


CASES = (
    Case("convolutions", "a small convolutional classifier", lambda: Supervised(
        convolutions(), data=(images(), classes())
    )),
    Case("image_side_is_batch_size", "8 channels of 8 x 8 pixels in batches of 8", lambda: Supervised(
        convolutions(channels=BATCH), data=(images(EVEN, BATCH, BATCH), classes(EVEN))
    )),
    Case("group_norm", "GroupNorm", lambda: _with(nn.GroupNorm(2, 4))),
    Case("instance_norm", "InstanceNorm", lambda: _with(nn.InstanceNorm2d(4, affine=True))),
    Case("instance_norm_running", "InstanceNorm with running statistics", lambda: _with(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    ), "either"),
    Case("batch_norm_1d", "BatchNorm1d", lambda: Supervised(
        nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.Linear(12, CLASSES))
    ), "refused"),
    Case("batch_norm_2d", "BatchNorm2d", lambda: _with(nn.BatchNorm2d(4)), "refused"),
    Case("batch_norm_frozen", "BatchNorm2d in evaluation mode", FrozenBatchNorm),
    Case("functional_batch_norm", "`F.batch_norm`", lambda: Supervised(
        nn.Sequential(nn.Linear(FEATURES, 12), FunctionalBatchNorm(12), nn.Linear(12, CLASSES))
    ), "refused"),
    Case("own_batch_norm", "a layer of one's own like SyncBatchNorm", lambda: Supervised(
        nn.Sequential(nn.Linear(FEATURES, 12), OwnBatchNorm(12), nn.Linear(12, CLASSES))
    ), "refused"),
    Case("batch_deviation", "deviation over the batch as a feature", lambda: Supervised(
        nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), BatchDeviation(), nn.Linear(13, CLASSES))
    ), "refused"),
    Case("spectral_norm", "spectral norm, a power iteration in each forward", lambda: Supervised(
        _spectral()
    ), "either"),
    Case("weight_norm", "weight norm", lambda: Supervised(_weight_norm())),
    Case("detection", "lists of images and of dicts, mean over images", lambda: Detector("images")),
    Case("detection_by_boxes", "the same, mean over all boxes", lambda: Detector("boxes"), "either"),
    Case("segmentation", "pixels of class 255 are ignored", lambda: Supervised(
        nn.Conv2d(2, 3, 3, padding=1), lambda out, y: F.cross_entropy(out, y, ignore_index=255), (images(), _pixels())
    ), "either"),
    Case("dice_over_batch", "Dice loss over the batch", lambda: Supervised(
        nn.Conv2d(2, 1, 3, padding=1), _batch_dice, (images(), _masks())
    ), "refused"),
    Case("dice_per_image", "Dice loss per image", lambda: Supervised(
        nn.Conv2d(2, 1, 3, padding=1), _dice_per_image, (images(), _masks())
    )),
    Case("vae_own_noise", "variational autoencoder, noise in the batch", lambda: Autoencoder(own_noise=True)),
    Case("vae", "variational autoencoder", lambda: Autoencoder(own_noise=False), "accepted"),
    Case("dropout", "dropout", lambda: Supervised(
        nn.Sequential(nn.Linear(FEATURES, 12), nn.Dropout(0.3), nn.Linear(12, CLASSES))
    ), "accepted"),
    Case("diffusion", "random times and noise", Diffusion, "accepted"),
    Case("mixup", "samples mixed with others of the batch, by `randperm`", Mixup, "refused"),
    Case("cutmix", "samples mixed with others of the batch, by `flip`", Cutmix, "refused"),
    Case("adversarial", "two optimizers, manual optimization", Adversarial, "refused"),
)  # fmt: skip
