"""`load_recipe`: a recipe's model, one real batch and settings, without a GPU, loggers or writing to disk."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader
from typing_extensions import override

import lightning_memfit
from lightning_memfit.models import CausalLM
from lightning_memfit.profile.step import Precision, StepOptions

from .arguments import LARGEST_COUNT
from .explain import import_public_names
from .lightning_cli import MemFitCLI

_PRECISIONS: dict[str, Precision] = {
    "32": "32-true",
    "32-true": "32-true",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "16": "16-mixed",
    "16-mixed": "16-mixed",
    "bf16-true": "bf16-true",
    "16-true": "16-true",
}

# Estimates describe one process on fake tensors, so the Trainer gets these; the recipe's own values are kept apart.
_STAND_IN = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "32-true"}


@dataclass(frozen=True)
class RecipeRun:
    """The training that a recipe describes."""

    module: pl.LightningModule
    batch: Any
    """One real batch from the recipe's own loader, in host memory."""
    options: StepOptions
    callbacks: tuple[pl.Callback, ...]
    accelerator: str
    strategy: Any
    """`trainer.strategy` as the recipe has it: a name, or a class with its arguments."""
    devices: int | None
    """Number of devices on each machine; None if the recipe takes all that exist."""
    num_nodes: int
    parsed: tuple[ArgumentParser, Namespace]
    """The recipe's parser, and its configuration before anything was made of it."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The recipe's whole configuration as plain values."""
        parser, config = self.parsed
        plain: dict[str, Any] = yaml.safe_load(parser.dump(config, skip_link_targets=False))
        return plain

    @property
    def takes_batch_size(self) -> bool:
        """Whether the data module has an argument `batch_size`."""
        return "batch_size" in ((self.config.get("data") or {}).get("init_args") or {})


class _RecipeCLI(MemFitCLI):
    """Instantiates everything, with a Trainer that runs anywhere and writes nothing."""

    @override
    def import_classes(self, arguments: Sequence[str]) -> None:
        """Import only what the recipe names: an estimate has no use for most of the package."""
        # Unlike `Path.is_file`, `isfile` takes texts that are too long for a path.
        values = (text.rpartition("=")[2] for text in arguments)
        files = [Path(value) for value in values if os.path.isfile(value)]
        texts = [*arguments, *(path.read_text(encoding="utf-8", errors="replace") for path in files)]
        folders = {Path(), *(path.parent for path in files)}
        if any(_names_file(text, folders) for text in texts[len(arguments) :]):
            import_public_names()  # whatever that file names
            return
        words = {word for text in texts for word in re.findall(r"\w+", text)}
        for name in words & set(lightning_memfit.__all__):
            getattr(lightning_memfit, name)
        if "strategy" in words:
            import_module("lightning_memfit.strategies")  # registers the names that `trainer.strategy` takes

    @override
    def before_instantiate_classes(self) -> None:
        """Record the recipe's hardware, precision and loggers, and replace them by stand-ins."""
        self.as_written = self.config.clone()
        trainer = self.config.trainer
        self.recipe = {name: trainer[name] for name in _STAND_IN}
        for name, value in _STAND_IN.items():
            trainer[name] = value
        trainer.logger = False
        trainer.enable_progress_bar = False


def _names_file(text: str, folders: Collection[Path]) -> bool:
    """Whether a recipe refers to another file for a part of it (`trainer: trainer.yaml`)."""
    values = re.findall(r":[ \t]+[\"']?([^\s\"'{}\[\],]+)", text)
    return any(os.path.isfile(folder / value) for value in values for folder in folders)


def load_recipe(arguments: list[str]) -> RecipeRun:
    """Instantiate a recipe and fetch a batch.

    Args:
        arguments: Command-line arguments as for `memfit fit`.

    Raises:
        ValueError: If the recipe has no training data, or a precision that estimates don't support.
    """
    cli = _RecipeCLI(arguments, run=False, save_config_callback=None)
    trainer, recipe = cli.trainer, cli.recipe
    if isinstance(cli.model, CausalLM):
        _ = cli.model.architecture  # read it here once, not in every trace of a copy
    options = StepOptions(
        _precision(recipe["precision"]),
        trainer.accumulate_grad_batches,
        trainer.gradient_clip_val,
        trainer.gradient_clip_algorithm,
    )
    if not 1 <= recipe["num_nodes"] <= LARGEST_COUNT:
        raise ValueError(f"`trainer.num_nodes={recipe['num_nodes']}` must be from 1 to {LARGEST_COUNT:,}.")
    processes = num_processes(recipe["devices"]) * recipe["num_nodes"]
    with isolate_rng():
        batch = _first_batch(cli, processes)
    cli.model.trainer = trainer  # the training step may use its data module
    callbacks = tuple(trainer.callbacks)  # type: ignore[attr-defined]
    devices = None if str(recipe["devices"]) in ("auto", "-1") else num_processes(recipe["devices"])
    return RecipeRun(
        cli.model,
        batch,
        options,
        callbacks,
        str(recipe["accelerator"]),
        recipe["strategy"],
        devices,
        recipe["num_nodes"],
        (cli.parser, cli.as_written),
    )


def _precision(value: Any) -> Precision:
    if value is None:
        return "32-true"
    if str(value) not in _PRECISIONS:
        raise ValueError(f"`trainer.precision={value!r}` can't be estimated. Known: {', '.join(_PRECISIONS)}.")
    return _PRECISIONS[str(value)]


def num_processes(devices: Any) -> int:
    """Return the number of processes on one node for the Trainer's `devices`; `auto` counts as one.

    Raises:
        ValueError: If it is no number of devices.
    """
    if isinstance(devices, (list, tuple)):
        return len(devices)
    text = str(devices)
    if not text.lstrip("-").isdecimal():
        return text.count(",") + 1
    if text != "-1" and not 1 <= int(text) <= LARGEST_COUNT:
        raise ValueError(f"`trainer.devices={devices}` must be from 1 to {LARGEST_COUNT:,}, or -1 for all that exist.")
    return max(1, int(text))


# --- data -------------------------------------------------------------------------------------------------------------


class _PlannedTrainer:
    """The stand-in Trainer as data modules see it, with the number of processes that the recipe asks for."""

    def __init__(self, trainer: pl.Trainer, world_size: int) -> None:
        self._trainer = trainer
        self.world_size = world_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def _first_batch(cli: MemFitCLI, processes: int) -> Any:
    """Return the first training batch, after the data module's own hooks, fetched in this process."""
    data = cli.datamodule
    owner: Any = data if data is not None else cli.model
    owner.trainer = _PlannedTrainer(cli.trainer, processes) if data is not None else cli.trainer
    if data is None and not is_overridden("train_dataloader", cli.model):
        raise ValueError("The recipe has neither `data` nor a model with `train_dataloader`, so there is no batch.")
    owner.prepare_data()
    owner.setup("fit")
    loaders = owner.train_dataloader()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    for loader in combined.flattened:
        _in_this_process(loader)
    try:
        batch, _, _ = next(iter(combined))
    except StopIteration:
        raise ValueError("The recipe's training loader gives no batch: it is empty.") from None
    if data is not None:
        cli.trainer.datamodule = data  # type: ignore[attr-defined]
        batch = data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)
    return batch


def _in_this_process(loader: Any) -> None:
    """Make a loader work without workers: starting them for one batch would take longer than the estimate."""
    if isinstance(loader, DataLoader):
        loader.num_workers = 0
        loader.timeout = 0
