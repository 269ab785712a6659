"""`Task`: what a row trains, read from its settings, so that every tool trains the same thing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_memfit.memory.conversion import default_dtype
from lightning_memfit.memory.kind import device_of

_READ = {"devices", "accelerator", "precision", "max_steps", "accumulate_grad_batches"}
_QUIET = {"max_epochs", "limit_val_batches", "logger", "enable_checkpointing"}
_QUIET |= {"enable_progress_bar", "enable_model_summary"}
_TOP = {"trainer", "model", "data", "seed_everything"}
_DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# All tools agree on a constant rate without decay; their parameter groups and schedules differ.
_HPARAMS = {"optimizer": "AdamW", "weight_decay": 0.0, "warmup_steps": 0, "min_learning_rate_fraction": 1.0}


class Task:
    """Model, data, batch, precision, optimizer and length of one training run on one device.

    Args:
        settings: Resolved configuration of a row, as for `memfit fit`.
        folder: Folder for files that a tool must write; its creator removes it.

    Attributes:
        device: Device that it is trained on.
        precision: By Lightning's name.
        dtype: Type of the weights.
        autocast_dtype: Type of matrix products under autocast; None without autocast.
        max_steps: Number of optimizer steps.
        accumulate: Number of micro-batches per optimizer step.
        seed: Seed of the random weights.

    Raises:
        ValueError: If the settings contain something that the tools would ignore.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        trainer: Mapping[str, Any] = settings["trainer"]
        unread = [name for name in settings if name not in _TOP]
        unread += [f"trainer.{name}" for name in trainer if name not in _READ | _QUIET]
        if unread:
            raise ValueError(f"`{unread[0]}` means nothing to a peer: what it is told stands in the row's `options`.")
        if trainer.get("devices", 1) != 1:
            raise ValueError(f"`trainer.devices={trainer['devices']}`: peers are run on one device.")
        self.settings, self.folder = settings, folder
        self.device = device_of(trainer["accelerator"])
        self.precision = str(trainer.get("precision", "32-true"))
        if self.precision not in _DTYPES | _AUTOCAST:
            choices = ", ".join(_DTYPES | _AUTOCAST)
            raise ValueError(f"`trainer.precision={self.precision}`: peers are run in one of {choices}.")
        self.dtype = _DTYPES.get(self.precision, torch.float32)
        self.autocast_dtype = _AUTOCAST.get(self.precision)
        self.max_steps = int(trainer["max_steps"])
        self.accumulate = int(trainer.get("accumulate_grad_batches", 1))
        self.seed = int(settings.get("seed_everything", 0))

    @property
    def learning_rate(self) -> float:
        """Constant learning rate of AdamW."""
        return float(self._module.hparams["learning_rate"])

    @cached_property
    def _module(self) -> Any:
        module = _instantiate("model", self.settings["model"])
        if not hasattr(module, "configure_model") or "learning_rate" not in module.hparams:
            raise ValueError(
                f"`model.class_path={self.settings['model']['class_path']}`: peers train the Hugging Face model of "
                "lightning_memfit.models, such as CausalLM."
            )
        for name, wanted in _HPARAMS.items():
            if module.hparams.get(name, wanted) != wanted:
                raise ValueError(
                    f"`model.init_args.{name}={module.hparams[name]!r}`: peers are compared with {wanted!r}, which "
                    "all tools do alike. Set it so."
                )
        return module

    def network(self) -> Any:
        """Build a Hugging Face model on the device, with the weights that Lightning's run starts from."""
        with self.device:
            return self._build()

    def import_model_code(self) -> None:
        """Build the model without memory, so that everything it imports is loaded."""
        with torch.device("meta"):
            self._build()

    def _build(self) -> Any:
        module = _instantiate("model", self.settings["model"])
        torch.manual_seed(self.seed)
        with default_dtype(self.dtype):
            module.configure_model()
        return module.model

    @cached_property
    def loader(self) -> DataLoader[Any]:
        """Return a loader of micro-batches in the order in which Lightning's run takes them.

        Raises:
            ValueError: If an epoch ends within an optimizer step, which every tool treats differently.
        """
        data = _instantiate("data", self.settings["data"])
        data.prepare_data()
        data.setup("fit")
        loader: DataLoader[Any] = data.train_dataloader()
        if self.max_steps * self.accumulate > len(loader) and len(loader) % self.accumulate:
            raise ValueError(
                f"`data`: the {len(loader)} micro-batches of an epoch are no multiple of "
                f"`trainer.accumulate_grad_batches={self.accumulate}`. Give more or fewer samples."
            )
        return loader

    def batches(self) -> Iterator[Any]:
        """Yield micro-batches without end, epoch after epoch."""
        while True:
            yield from self.loader

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Enable mixed precision as a hand-written loop does; do nothing in other precisions.

        Raises:
            ValueError: If the precision is mixed float16, which needs scaled losses.
        """
        if self.autocast_dtype is torch.float16:
            raise ValueError("`trainer.precision=16-mixed`: hand-written loops are run in bf16-mixed or 32-true.")
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            yield


def named(argument: str, path: str) -> Any:
    """Return the object that an import path names.

    Raises:
        ValueError: If there is nothing with that name.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"`{argument}={path}` can't be imported: {error}.") from error


def _instantiate(argument: str, entry: Mapping[str, Any]) -> Any:
    return named(f"{argument}.class_path", entry["class_path"])(**entry.get("init_args", {}))
