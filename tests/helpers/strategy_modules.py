"""Modules that don't do what sharding would like: no `configure_model`, and steps that don't call the module."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_memfit.strategies.checkpoint_io import AtomicCheckpointIO
from tests.helpers.strategy_runs import build_trainer


class Numbers(pl.LightningDataModule):
    """Random inputs and targets, dealt to the ranks in turn."""

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 16, generator=generator), torch.randn(64, 4, generator=generator))
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False, **placement))

    val_dataloader = train_dataloader


class Plain(pl.LightningModule):
    """Its step calls itself, its network, or the network's layers one by one; or steps by hand."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.calls = calls
        hidden = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(16, 32), *hidden, nn.Linear(32, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.losses: list[torch.Tensor] = []
        self.automatic_optimization = calls != "by hand"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == "itself":
            return self(x)
        if self.calls == "layers":
            for layer in self.net:
                x = layer(x)
            return x * self.scale
        return self.net(x) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.predict(batch[0]), batch[1])
        self.losses.append(loss.detach())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.predict(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ByHand(pl.LightningModule):
    """No layer of its network is repeated, and its step runs backward and optimizers in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization, self.way = False, way
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.critic = nn.Linear(4, 1)
        if way == "two optimizers":
            self.target = nn.Linear(4, 1).requires_grad_(False)
        self.losses: list[torch.Tensor] = []

    def loss(self, batch: Any) -> torch.Tensor:
        predicted = self.net(batch[0])
        loss = nn.functional.mse_loss(predicted, batch[1]) + 0.1 * self.critic(predicted).square().mean()
        self.losses.append(loss.detach())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.way == "two optimizers":
            of_net, of_critic = self.optimizers()
            for kept, followed in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                kept.data.mul_(0.5).add_(followed.data, alpha=0.5)  # as momentum encoders do
            self.toggle_optimizer(of_net)
            self.manual_backward(self.loss(batch))
            of_net.step()
            of_net.zero_grad()
            self.untoggle_optimizer(of_net)
            self.toggle_optimizer(of_critic)
            predicted = self.net(batch[0]).detach()
            loss = (self.critic(predicted) - self.target(predicted) - 1).square().mean()
            self.losses.append(loss.detach())
            self.manual_backward(loss)
            of_critic.step()
            of_critic.zero_grad()
            self.untoggle_optimizer(of_critic)
            return
        optimizer = self.optimizers()
        if self.way == "closures":

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)
            return
        for _ in range(2 if self.way == "two steps" else 1):
            optimizer.zero_grad()
            for scale in (1, 2) if self.way == "two passes" else (1,):
                self.manual_backward(self.loss(batch) * scale)
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.way == "two optimizers":
            return torch.optim.Adam(self.net.parameters(), 1e-2), torch.optim.SGD(self.critic.parameters(), 0.1)
        if self.way == "flat":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train, validate and train on a module whose first weights differ from rank to rank."""
    torch.manual_seed(int(os.environ.get("LOCAL_RANK", 0)))
    module = {"Plain": Plain, "ByHand": ByHand}[case.get("module", "Plain")](case["calls"])
    trainer = build_trainer(case, max_steps=4, limit_val_batches=2)
    trainer.fit(module, Numbers())
    validated = trainer.validate(module, Numbers(), verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, Numbers())
    losses = [float(trainer.strategy.reduce(loss, reduce_op="mean")) for loss in module.losses]
    left = sorted(name for name in vars(module) if name.endswith("_step") or name == "configure_model")
    return {"losses": losses, "val_loss": validated[0]["val_loss"], "left": left}


class TwoGroups(Plain):
    """An optimizer with groups that differ, and a schedule."""

    def __init__(self) -> None:
        super().__init__("itself")

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.net[:2].parameters()},
            {"params": [*self.net[2:].parameters(), self.scale], "lr": 1e-3, "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Partly(Plain):
    """A layer is frozen, and its optimizer has only some of the others."""

    def __init__(self) -> None:
        super().__init__("itself")
        self.net[1].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.net[2:].parameters(), self.scale], lr=1e-2)


def save_and_resume(case: dict[str, Any]) -> dict[str, Any]:
    """Train in one go; train half of it and go on from a checkpoint; evaluate that as well."""
    path = str(Path(case["folder"]) / "half.ckpt")

    def train(steps: int, ckpt_path: str | None = None) -> tuple[pl.Trainer, Plain]:
        torch.manual_seed(0)
        trainer, module = build_trainer(case, max_steps=steps, limit_val_batches=2), globals()[case["module"]]()
        trainer.fit(module, Numbers(), ckpt_path=ckpt_path)
        return trainer, module

    _, whole = train(4)
    trainer, half = train(2)
    trainer.save_checkpoint(path)
    validated = trainer.validate(half, Numbers(), verbose=False)
    _, resumed = train(4, path)
    losses = [float(trainer.strategy.reduce(loss, reduce_op="mean")) for loss in (*whole.losses, *resumed.losses)]
    missing = sorted(set(half.state_dict()) - set(AtomicCheckpointIO().load_checkpoint(path)["state_dict"]))
    return {"losses": losses, "val_loss": validated[0]["val_loss"], "missing": missing}


class Sometimes(Plain):
    """One of its layers takes part in the first of every three batches."""

    def __init__(self) -> None:
        super().__init__("itself")
        self.other = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self(batch[0])
        if batch_idx % 3 == 0:
            predicted = self.other(predicted)
        loss = nn.functional.mse_loss(predicted, batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def train_only(case: dict[str, Any]) -> dict[str, Any]:
    """Train for some steps; what became of the weights is in the losses."""
    torch.manual_seed(0)
    trainer, module = build_trainer(case), globals()[case["module"]]()
    trainer.fit(module, Numbers())
    losses = [float(trainer.strategy.reduce(loss, reduce_op="mean")) for loss in module.losses]
    return {"losses": losses, "left": sorted(name for name in vars(module) if name.startswith("on_"))}
