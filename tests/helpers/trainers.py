"""Trainers for tests: on the CPU, without output, and without files unless a test asks for them."""

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_memfit.techniques.core.precision import split_precision
from tests.helpers.ranks import run_ranks

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def quiet_trainer(*callbacks: pl.Callback, devices: int = 1, **options: Any) -> pl.Trainer:
    """A quiet CPU trainer of two epochs, or of `max_steps`.

    The ranks of two devices talk over gloo with a short timeout.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if devices > 1:
        strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
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


def fit_on_two_ranks(
    module: pl.LightningModule, folder: Path, *callbacks: pl.Callback, **options: Any
) -> list[tuple[list[Tensor], list[int]]]:
    """Train on two ranks and return each rank's weights and the samples it saw.

    Raises:
        RuntimeError: A rank failed; the text is what it raised and printed.
    """
    ended = run_ranks(_trained, 2, folder, module, callbacks, options)
    for one in ended:
        if one.code:
            raise RuntimeError(one.error + one.output)
    return [one.result for one in ended]


def _trained(
    module: pl.LightningModule, callbacks: tuple[pl.Callback, ...], options: dict[str, Any]
) -> tuple[list[Tensor], list[int]]:
    fit(module, *callbacks, devices=2, **options)
    return [p.detach().clone() for p in module.parameters()], getattr(module, "seen", [])


def difference(module: pl.LightningModule | list[Tensor], other: pl.LightningModule | list[Tensor]) -> float:
    """The largest difference between two sets of weights."""
    ours, theirs = ([*one.parameters()] if isinstance(one, pl.LightningModule) else one for one in (module, other))
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
