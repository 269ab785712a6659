"""Modules as Lightning's users write them, which touch weights and gradients in their steps and hooks."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """Three equal blocks between two layers, of which one has rows that two ranks can't divide."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inp(x)))


class Base(pl.LightningModule):
    """Trains on the batches of one device, of which each rank has a part."""

    by_hand = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.automatic_optimization = not self.by_hand
        self.seen: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        rank, count = self.global_rank, self.trainer.world_size
        data = [torch.randn(16, 3, generator=generator)[rank::count] for _ in range(2)]
        return DataLoader(TensorDataset(*data), batch_size=4 // count)

    val_dataloader = train_dataloader


class ByHand(Base):
    by_hand = True

    def step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step(batch)


class MomentumTarget(Base):
    """A frozen network follows the trained one, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for new, old in zip(self.net.parameters(), self.target.parameters(), strict=True):
                old.mul_(0.5).add_(new, alpha=0.5)
            expected = self.target(batch[0])
        return (self.net(batch[0]) - 1 - expected).square().mean()


class Clipped(ByHand):
    """Clips weights after each step, as in a Wasserstein GAN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step(batch)
        with torch.no_grad():
            for weight in self.net.parameters():
                weight.clamp_(-0.3, 0.3)


class ClippedData(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step(batch)
        for weight in self.net.parameters():
            weight.data.clamp_(-0.3, 0.3)


class ClippedInForward(Base):
    """A block writes its own weights before it computes with them."""

    def __init__(self) -> None:
        super().__init__()
        block, forward = self.net.blocks[1], self.net.blocks[1].forward

        def clipped(x: Tensor) -> Tensor:
            with torch.no_grad():
                block.a.weight.clamp_(-0.2, 0.2)
                block.b.weight.data = block.b.weight.data.clamp(-0.2, 0.2)
            return forward(x)

        block.forward = clipped


class Adversaries(ByHand):
    """Lightning's example of a GAN, with `toggle_optimizer`."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(self.critic.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        of_net, of_critic = self.optimizers()
        self.toggle_optimizer(of_net)
        self.manual_backward(-self.critic(self.net(batch[0])).mean())
        of_net.step()
        of_net.zero_grad()
        self.untoggle_optimizer(of_net)
        self.toggle_optimizer(of_critic)
        self.manual_backward((self.critic(self.net(batch[0]).detach()) - self.critic(batch[1])).square().mean())
        of_critic.step()
        of_critic.zero_grad()
        self.untoggle_optimizer(of_critic)


class Frozen(ByHand):
    """Freezes weights within every second step, for two passes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.net.inp.requires_grad_(batch_idx % 2 == 0)
        self.net.blocks[0].requires_grad_(batch_idx % 2 == 0)
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Gradients(ByHand):
    """Clips gradients of `parameters()` and takes them away in its step, and steps torch's own optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        for _ in range(2):
            self.manual_backward(self.loss(batch))
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            optimizer.step()
            self.zero_grad()


class InHooks(Base):
    """Calls its network and writes its weights in hooks."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.seen.append(float(self.net(torch.ones(1, 3)).sum()))
            for weight in self.net.parameters():
                weight.mul_(0.95)

    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            for weight in self.net.parameters():
                weight.mul_(0.95)

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.seen.append(float(self.net(torch.ones(1, 3)).sum()))


class OfOptimizer(Base):
    """Writes what its optimizer steps, after validation."""

    def on_validation_epoch_end(self) -> None:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.detach().mul_(0.95)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net(torch.ones(1, 3))
        self.on_validation_epoch_end()


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class WholePenalty(Base):
    """A penalty of weights, made whole term by term, and norms of gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        terms = [whole(p.square().sum()) + whole(p.norm()) for p in self.net.parameters()]
        return self.loss(batch) + 0.1 * torch.stack(terms).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters()]
        self.seen += [float(whole(one.norm())) for one in gradients]
        self.seen.append(float(whole(torch.nn.utils.get_total_norm(gradients))))


class TiedBlocks(Base):
    """Blocks have a weight in common, one of them a layer with the rest of the network."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = self.net.blocks
        second.a.weight, third.b = first.a.weight, nn.Linear(8, 4)
        self.again = third.b

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.again(batch[0].new_ones(1, 8)).square().mean()


class NotANumber(ByHand):
    """The loss of its second batch is no number."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (float("nan") if self.is_second else 1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.is_second = batch_idx == 1
        self.step(batch)


class Unfrozen(Base):
    """Most weights are frozen in its first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.inp.requires_grad_(False)
        self.net.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.requires_grad_(True)


class Finetuning(BaseFinetuning):
    """Lightning's way to do so."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.inp, pl_module.net.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.net.inp, pl_module.net.blocks], optimizer, lr=0.1)


class Alternating(Base):
    """Trains one half of its weights in every second step, the other half in the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.inp.requires_grad_(batch_idx % 2 == 0)
        self.net.head.requires_grad_(batch_idx % 2 == 1)
        return self.loss(batch)


class AlternatingInHook(Base):
    """Does so in a hook."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.inp.requires_grad_(batch_idx % 2 == 0)
        self.net.head.requires_grad_(batch_idx % 2 == 1)


class AlternatingAndUnfrozen(Alternating):
    """Does so, and trains its blocks from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    def on_train_epoch_start(self) -> None:
        self.net.blocks.requires_grad_(self.current_epoch > 0)


class Added(Base):
    """Gets a layer in its second epoch, and in the first a copy of its network that no optimizer steps."""

    def loss(self, batch: Any) -> Tensor:
        loss = (self.extra(self.net(batch[0])) - batch[1]).square().mean() if self.has_extra else super().loss(batch)
        return loss + (self.copied(batch[0]).detach() - self.net(batch[0])).square().mean()

    has_extra = False

    def on_train_start(self) -> None:
        self.copied = copy.deepcopy(self.net)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.add()

    def add(self) -> None:
        torch.manual_seed(self.global_rank)  # the ranks' own values, of which the first rank's count
        self.extra, self.has_extra = nn.Linear(3, 3), True
        optimizer: Any = self.optimizers()
        optimizer.add_param_group({"params": list(self.extra.parameters())})


class AddedAtOnce(Added):
    """Gets the layer before its first step, once its optimizer is made."""

    def on_train_epoch_start(self) -> None:
        if not self.has_extra:
            self.add()


class AddedValidating(Added):
    """Is also validated, after which DDP's flags are those of a pass without gradients."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class AddedInStep(Added):
    """Gets the layer in the midst of a step."""

    def on_train_epoch_start(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and not self.has_extra:
            super().on_train_epoch_start()
        return super().training_step(batch, batch_idx)


class AddedFrozenApart(Added):
    """Trains the layer from its third epoch on; until then ranks have values of their own, if nobody sends them any."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch > 0:
            self.extra.requires_grad_(self.current_epoch > 1)


class AddedFrozen(AddedFrozenApart):
    """Does so with equal values from the start."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            nn.init.constant_(self.extra.weight, 0.3)  # what is frozen is nobody's to send to other ranks
            nn.init.zeros_(self.extra.bias)


class UnfrozenInStep(Base):
    """Unfreezes weights within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.inp.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.inp.requires_grad_(batch_idx > 1)
        return self.loss(batch)


class StepOfInstance(Base):
    """Its step is a function that it has been given, as by a decorator; without repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.factor = nn.Parameter(torch.ones(3))
        self.training_step = lambda batch, batch_idx: self.factor.mean() * self.loss(batch)


class StepOfCallback(Base):
    """A hook puts a layer around the step in the first epoch, and another step in its place in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def on_train_epoch_start(self) -> None:
        step = self.training_step

        def counted(batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch_idx)
            return step(batch, batch_idx)

        self.training_step = counted if self.current_epoch == 0 else lambda batch, batch_idx: 2 * self.loss(batch)


class BeforeTheFirstStep(Base):
    """Calls its network, and a block alone, before anything was trained."""

    def on_fit_start(self) -> None:
        with torch.no_grad():
            self.seen.append(float(self.net.blocks[0](torch.ones(1, 4)).sum()))
            self.seen.append(float(self.net(torch.ones(1, 3)).sum()))


class Averaged(Base):
    """Validates with other weights, which it puts into the optimizer's parameters for as long as that takes."""

    names: Any = staticmethod(lambda self: [one for group in self.optimizers().param_groups for one in group["params"]])

    def on_validation_start(self) -> None:
        with torch.no_grad():
            self.kept = [one.detach().clone() for one in self.names(self)]
            for one in self.names(self):
                one.mul_(0.5)

    def on_validation_end(self) -> None:
        with torch.no_grad():
            for one, kept in zip(self.names(self), self.kept, strict=True):
                one.copy_(kept)


class AveragedOwn(Averaged):
    """The same, by its own parameters."""

    names = staticmethod(lambda self: list(self.parameters()))


class Penalty(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.1 * sum(p.square().sum() for p in self.net.parameters())


class UsedInStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.net.blocks[0].a.bias
        return self.loss(batch) + (weight[:3] * batch[1]).sum()


class LayerInHook(Base):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net.inp(torch.ones(1, 3))


class GradientPenalty(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        found = self.net(x)
        (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return (found - batch[1]).square().mean() + gradient.square().mean()


class GradientNorms(Base):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


class HookOfParts(Base):
    """Changes gradients that are complete, of a block and of no block."""

    def on_train_start(self) -> None:
        def halve(weight: Any) -> None:
            weight.grad.mul_(0.5)

        for weight in (self.net.head.weight, self.net.blocks[1].b.weight):
            weight.register_post_accumulate_grad_hook(halve)


class Buffers(Base):
    """Each rank fills buffers, and one of no tensor, with its number."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(4):
            self.register_buffer(f"own{index}", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for index in range(4):
            getattr(self, f"own{index}").fill_(self.global_rank + 1)
        return self.loss(batch)

    def get_extra_state(self) -> Any:
        return {"rank": self.global_rank + 1}

    def set_extra_state(self, state: Any) -> None:
        pass


PLAIN: dict[str, bool] = {}
LEFT_GATHERED = {"reshard_after_forward": False}
SHARDED: dict[str, dict[str, bool]] = {
    **dict.fromkeys(("MomentumTarget", "Clipped", "ClippedData", "ClippedInForward", "Adversaries"), PLAIN),
    **dict.fromkeys(
        ("Frozen", "Gradients", "InHooks", "OfOptimizer", "WholePenalty", "TiedBlocks", "NotANumber"), PLAIN
    ),
    **dict.fromkeys(("StepOfInstance", "StepOfCallback", "BeforeTheFirstStep", "HookOfParts"), PLAIN),
    **dict.fromkeys(("Averaged", "AveragedOwn"), LEFT_GATHERED),
}
"""What FSDP2 trains as one device does, with options of the strategy."""
REFUSED: dict[str, dict[str, bool]] = dict.fromkeys(
    ("Penalty", "UsedInStep", "LayerInHook", "GradientPenalty", "GradientNorms"), PLAIN
)
