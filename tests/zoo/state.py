"""Modules whose step changes more than gradients: teachers, queues, codebooks, counters, buffers, generators."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.base import CLASSES, FEATURES, Case, Supervised, features, floats, mlp


class MomentumTeacher(Supervised):
    """A teacher that follows the weights; in the step, or in a hook after it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.where == "step":
            self._follow()
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y) + (out - self.teacher(x + 0.1)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.where == "hook":
            self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


class Byol(MomentumTeacher):
    """A predictor on two views, and a teacher that follows in the step."""

    def __init__(self) -> None:
        super().__init__("step")
        self.predict = mlp(CLASSES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        loss = -F.cosine_similarity(self.predict(self.net(x)), self.teacher(x.flip(1))).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self._follow()
        return loss


class MoCo(Supervised):
    """Keys of earlier batches wait in a queue."""

    drop_last = True

    def __init__(self) -> None:
        super().__init__(drop_last=True)
        self.register_buffer("queue", F.normalize(floats(24, CLASSES, seed=5), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        query, key = (F.normalize(self.net(view), dim=1) for view in (x, x.flip(1)))
        scores = torch.cat([(query * key.detach()).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.3
        loss = F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))
        places = (self.place + torch.arange(len(x))) % len(self.queue)
        self.queue[places] = key.detach()
        self.place.copy_((self.place + len(x)) % len(self.queue))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Codebook(Supervised):
    """VQ-VAE whose codes follow the means of what chose them."""

    def __init__(self) -> None:
        super().__init__(mlp(3), data=(features(),))
        self.decode = nn.Linear(3, FEATURES)
        self.register_buffer("codes", floats(4, 3, seed=5))
        self.register_buffer("counts", torch.ones(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        z = self.net(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        code = self.codes[chosen]
        loss = (self.decode(z + (code - z).detach()) - x).square().mean() + 0.25 * (z - code).square().mean()
        with torch.no_grad():
            which = F.one_hot(chosen, 4).to(z.dtype)
            self.counts.mul_(0.9).add_(0.1 * which.sum(0))
            used = which.sum(0) > 0
            means = (which.T @ z.detach()) / which.sum(0).clamp(min=1)[:, None]
            self.codes[used] = self.codes[used] * 0.9 + means[used] * 0.1
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class RunningInputs(Supervised):
    """Inputs are normalised by a mean and a deviation that follow the data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("square", torch.ones(FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net((x - self.mean) / (self.square - self.mean**2).clamp(min=1e-2).sqrt()), y)
        self.mean.lerp_(x.mean(0), 0.1)
        self.square.lerp_(x.square().mean(0), 0.1)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class ClassSums(Supervised):
    """A buffer that adds up what it sees: parts add up to the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.seen += F.one_hot(batch[1], CLASSES).sum(0)
        return super().training_step(batch, batch_idx)


class PlainTensor(RunningInputs):
    """The same running mean in a plain attribute, no buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean, self.square
        self.mean, self.square = torch.zeros(FEATURES).double(), torch.ones(FEATURES).double()


class CenteredTeacher(Supervised):
    """DINO's centre: a running mean of what the teacher says."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        with torch.no_grad():
            target = self.teacher(x)
            soft = ((target - self.center) / 0.5).softmax(1)
            self.center = self.center * 0.9 + target.mean(0, keepdim=True) * 0.1
        loss = -(soft * self.net(x.flip(1)).log_softmax(1)).sum(1).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Annealed(Supervised):
    """The weight of a term grows with the number of steps, from a counter of its own or from Lightning's."""

    def __init__(self, counter: str) -> None:
        super().__init__()
        self.counter = counter
        self.calls = 0
        if counter == "buffer":
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.counter == "attribute":
            self.calls += 1
            now = self.calls
        elif self.counter == "buffer":
            self.steps += 1
            now = int(self.steps)
        else:
            now = batch_idx + 1 if self.counter == "batch_idx" else self.global_step + 1
        loss = F.cross_entropy(self.net(batch[0]), batch[1]) + 0.05 * now * self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class _History:
    """A plain object that remembers."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.count = 0

    def add(self, value: float) -> None:
        self.values.append(value)
        self.count += 1

    @property
    def mean(self) -> float:
        return sum(self.values[-3:]) / 3 if self.values else 1.0


class WithHistory(Supervised):
    """The loss is divided by the mean of the last three, which a plain object remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.history = _History()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        scaled = loss / self.history.mean
        self.history.add(float(loss))
        return scaled


class Baseline(Supervised):
    """REINFORCE with a running baseline of rewards, without randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.baseline = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        policy = self.net(x).log_softmax(1)
        action = policy.argmax(1)
        reward = (action == y).to(x.dtype)
        loss = -((reward - self.baseline) * policy.gather(1, action[:, None]).squeeze(1)).mean()
        self.baseline = 0.9 * self.baseline + 0.1 * float(reward.mean())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Replay(Supervised):
    """Samples of earlier batches are trained on again."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if self.memory:
            old, target = self.memory[-1]
            loss = loss + 0.5 * F.cross_entropy(self.net(old), target)
        self.memory.append((x[:2].clone(), y[:2].clone()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class OwnGenerator(Supervised):
    """Uniform noise, drawn row by row: parts draw what the whole batch would."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5) if own else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        loss = F.cross_entropy(self.net(x + 0.3 * noise), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class SeededByIndex(Supervised):
    """Noise from a generator that each batch seeds with its index."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(batch_idx), dtype=x.dtype)
        loss = F.cross_entropy(self.net(x + noise), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class OneDrawPerBatch(Supervised):
    """One random number scales the whole batch, as in training on several image sizes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x * (0.5 + torch.rand(()))), y)


class Unfrozen(Supervised):
    """The first layer learns from the fourth batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(self.global_step >= 3)


class ActivationHook(Supervised):
    """A forward hook gathers activations for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.activations: list[Tensor] = []
        self.net[1].register_forward_hook(lambda module, inputs, out: self.activations.append(out))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.activations.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * self.activations[0].abs().mean()


class ClippedInStep(Supervised):
    """Weights are clipped at the start of the step, as in the first Wasserstein GAN."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.clamp_(-0.35, 0.35)
        return super().training_step(batch, batch_idx)


class ShrunkInStep(Supervised):
    """Weights decay by hand in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.mul_(0.99)
        return super().training_step(batch, batch_idx)


class GradientHook(Supervised):
    """A hook changes each weight's gradient as it comes: by a factor, or by clamping it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_fit_start(self) -> None:
        for parameter in self.net.parameters():
            parameter.register_hook(self._scale if self.kind == "scale" else self._clamp)

    @staticmethod
    def _scale(gradient: Tensor) -> Tensor:
        return 0.5 * gradient

    @staticmethod
    def _clamp(gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


class AfterBackward(Supervised):
    """`on_after_backward` normalises the gradients."""

    def on_after_backward(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad /= parameter.grad.norm() + 1e-6


class Reversal(torch.autograd.Function):
    """Reverses a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -0.1 * gradients[0]


class Reversed(Supervised):
    """A gradient-reversal layer before a second head."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8))
        self.first, self.second = nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.net(x).tanh()
        domain = self.second(Reversal.apply(hidden)).squeeze(1)
        loss = F.cross_entropy(self.first(hidden), y)
        loss = loss + F.binary_cross_entropy_with_logits(domain, (x[:, 0] > 0).to(x.dtype))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Lazy(Supervised):
    """Inputs are scaled by what the first batch was like."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.scale is None:  # data-dependent initialisation, as in Glow
            self.scale = 1 / (x.std(0) + 0.1)
        loss = F.cross_entropy(self.net(x * self.scale), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


CASES = (
    Case("teacher_in_step", "momentum teacher, updated in the step", lambda: MomentumTeacher("step"), "either"),
    Case("teacher_in_hook", "momentum teacher, updated after the batch", lambda: MomentumTeacher("hook")),
    Case("byol", "BYOL", Byol, "either"),
    Case("moco", "MoCo's queue of keys", MoCo, "either"),
    Case("codebook", "VQ-VAE with a codebook of moving averages", Codebook, "either"),
    Case("running_inputs", "running mean and deviation of the inputs", RunningInputs, "either"),
    Case("running_plain_tensor", "the same in plain attributes", PlainTensor, "either"),
    Case("buffer_of_sums", "a buffer that adds up what it sees", ClassSums, "either"),
    Case("center", "DINO's centre", CenteredTeacher, "either"),
    Case("annealed_by_attribute", "a term grows with an own counter", lambda: Annealed("attribute"), "either"),
    Case("annealed_by_buffer", "a term grows with a counter in a buffer", lambda: Annealed("buffer"), "either"),
    Case("annealed_by_global_step", "a term grows with `global_step`", lambda: Annealed("global_step")),
    Case("annealed_by_batch_idx", "a term grows with `batch_idx`", lambda: Annealed("batch_idx")),
    Case("history_object", "the loss is scaled by what a plain object remembers", WithHistory, "either"),
    Case("baseline", "REINFORCE with a running baseline", Baseline, "either"),
    Case("replay", "samples of earlier batches again", Replay, "either"),
    Case("own_generator", "noise of a generator of its own", lambda: OwnGenerator(own=True), "either"),
    Case("uniform_noise", "uniform noise of the global generator", lambda: OwnGenerator(own=False), "either"),
    Case("seeded_by_batch_idx", "noise seeded by `batch_idx`", SeededByIndex, "either"),
    Case("one_draw_per_batch", "one random number scales the batch", OneDrawPerBatch, "accepted"),
    Case("unfrozen_later", "a layer is unfrozen after three steps", Unfrozen),
    Case("activation_hook", "a penalty on activations that a hook gathers", ActivationHook),
    Case("weights_clipped_in_step", "weights are clipped in the step", ClippedInStep, "either"),
    Case("weights_decay_in_step", "weights decay in the step", ShrunkInStep, "either"),
    Case("gradient_hook_scale", "a hook halves gradients", lambda: GradientHook("scale")),
    Case("gradient_hook_clamp", "a hook clamps gradients", lambda: GradientHook("clamp"), "either"),
    Case("after_backward", "`on_after_backward` normalises gradients", AfterBackward),
    Case("gradient_reversal", "gradient reversal", Reversed),
    Case("first_batch_sets_scale", "initialised by the first batch", Lazy, "either"),
)
