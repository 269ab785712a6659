"""Steps that differ from one another, which get the peak of a plain run, or a reason."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.classifier import CLASSES, WIDTH, Classifier


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class EveryFourth(Manual):
    """Lightning's documented accumulation by hand."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 4)
        if (batch_idx + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(pl.LightningModule):
    every, at = 1, 0

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))

    def training_step(self, batch, batch_idx):
        real, (first, second) = batch["x"], self.optimizers()
        noise, ones = torch.randn(len(real), 16), torch.ones(len(real), 1)
        judged = self.critic(torch.cat([real, self.generator(noise).detach()]))
        second.zero_grad()
        self.manual_backward(F.binary_cross_entropy_with_logits(judged, torch.cat([ones, 1 - ones])))
        second.step()
        if batch_idx % self.every == self.at:
            first.zero_grad()
            self.manual_backward(F.binary_cross_entropy_with_logits(self.critic(self.generator(noise)), ones))
            first.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.critic.parameters())], []


class CriticFirst(TwoOptimizers):
    every, at = 5, 4


class GeneratorFirst(TwoOptimizers):
    every, at = 5, 0


class ThreeOptimizers(Manual):
    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 256), nn.Linear(256, CLASSES)) for _ in range(3))

    def training_step(self, batch, batch_idx):
        for net, optimizer in zip(self.nets, self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(net(batch["x"]), batch["y"]))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters()) for net in self.nets], []


class Bank(Classifier):
    """Fills over six steps."""

    def __init__(self):
        super().__init__()
        self.bank = []

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch["x"])
        self.bank = [*self.bank, hidden.detach()][-6:]
        return F.cross_entropy(self.head(hidden), batch["y"])


class Deep(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def runs(self, number):
        return True

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for number, block in enumerate(self.blocks):
            if self.runs(number):
                x = x + F.gelu(block(x))
        return F.cross_entropy(self.head(x), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Quasi(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=4, history_size=10)


class KeepsOutputs(Classifier):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch["x"])
        self.outputs.append(self.net(batch["x"]))
        return F.cross_entropy(self.head(hidden), batch["y"])

    def on_train_epoch_end(self):
        self.outputs.clear()


class KeepsLosses(Classifier):
    """Four bytes a batch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss


class KeepsAFewLosses(KeepsLosses):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        del self.losses[2:]
        return loss


class NeverSteps(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))


class LoopsOnAFloat(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        while self.loss(batch).item() > 0:
            pass
        return loss


class Swallows(Classifier):
    def training_step(self, batch, batch_idx):
        while True:
            try:
                self.loss(batch)
            except Exception:
                continue


class SkipsItsEpochs(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        return -1


class OneIsIdle(TwoOptimizers):
    every, at = 10_000_000, 1


class StepsInItsBackward(Manual):
    """PyTorch's tutorial: every parameter has an optimizer of its own, that Lightning doesn't know."""

    def __init__(self):
        super().__init__()
        self.steps = {weight: torch.optim.Adam([weight], foreach=False) for weight in self.parameters()}
        for weight in self.parameters():
            weight.register_post_accumulate_grad_hook(self.step)

    def step(self, weight):
        self.steps[weight].step()
        weight.grad = None

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))

    def configure_optimizers(self):
        return None


class StepsByHand(Manual):
    def training_step(self, batch, batch_idx):
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for weight in self.parameters():
                weight.sub_(weight.grad, alpha=0.01)

    def configure_optimizers(self):
        return None


PEAKS = {
    EveryFourth: 8,
    TwoOptimizers: 4,
    CriticFirst: 10,
    GeneratorFirst: 11,
    ThreeOptimizers: 4,
    Bank: 9,
    Quasi: 12,
    StepsInItsBackward: 3,
    StepsByHand: 3,
}
"""Modules, and after how many batches their peak has come."""
REFUSED = (NeverSteps, Swallows, SkipsItsEpochs, OneIsIdle, LoopsOnAFloat)
"""Modules whose steps don't end, or change without an end."""
