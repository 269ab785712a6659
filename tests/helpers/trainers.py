"""Trainers for tests: on the CPU, without output, and without files unless a test asks for them."""

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_memfit.techniques.core.precision import split_precision

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def quiet_trainer(*callbacks: pl.Callback, devices: int = 1, **options: Any) -> pl.Trainer:
    """A quiet CPU trainer of two epochs, or of `max_steps`.

    Two processes are forked and talk over gloo with a short timeout.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if devices > 1:
        strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=timedelta(seconds=60))
        options = {"strategy": strategy, "use_distributed_sampler": False} | options
    callbacks, plugins = split_precision(callbacks)
    if plugins:  # which take the place of the name
        options = {name: value for name, value in options.items() if name != "precision"} | {"plugins": plugins}
    limits = {} if options.keys() & {"max_epochs", "max_steps"} else {"max_epochs": 2}
    return pl.Trainer(
        **{"accelerator": "cpu", "devices": devices, "callbacks": list(callbacks), **QUIET, **limits, **options}
    )


def fit(
    module: pl.LightningModule, *callbacks: pl.Callback, loader: Any = None, val_loader: Any = None, **options: Any
) -> pl.Trainer:
    """Train a module on a loader or a data module, or on its own loader; `options` are those of the Trainer."""
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(module, loader, val_loader)
    return trainer


class KeepWeights(pl.Callback):
    """Save the weights of every rank, which live in other processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights = [p.detach().clone() for p in pl_module.parameters()]
        seen = getattr(pl_module, "seen", [])
        torch.save((weights, seen), self.folder / f"{trainer.world_size}-{trainer.global_rank}.pt")


def fit_on_two_ranks(
    module: pl.LightningModule, folder: Path, *callbacks: pl.Callback, **options: Any
) -> list[tuple[list[Tensor], list[int]]]:
    """Train on two ranks and return each rank's weights and the samples it saw."""
    fit(module, *callbacks, KeepWeights(folder), devices=2, **options)
    return [torch.load(folder / f"2-{rank}.pt") for rank in range(2)]


def difference(module: pl.LightningModule | list[Tensor], other: pl.LightningModule | list[Tensor]) -> float:
    """The largest difference between two sets of weights."""
    ours, theirs = ([*one.parameters()] if isinstance(one, pl.LightningModule) else one for one in (module, other))
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
