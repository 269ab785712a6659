"""`load_recipe`: a recipe's model, one batch and settings, without a GPU, loggers or writing to disk.

Weights are not loaded, and no data are read where the data module knows the shapes of a batch (`example_batch`), or the
user gives them.
"""

from __future__ import annotations

import math
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader
from typing_extensions import override

import lightning_memfit
from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.models import CausalLM
from lightning_memfit.profile.build import batch_size
from lightning_memfit.profile.step import Precision, StepOptions
from lightning_memfit.techniques.core.precision import TechniquePrecision

from .arguments import LARGEST_COUNT
from .explain import import_public_names
from .lightning_cli import MemFitCLI, plain
from .recipe_files import configs_of

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

_MOST_DEVICES = 1 << 16

# Estimates describe one process on fake tensors, so the Trainer gets these; the recipe's own values are kept apart.
_STAND_IN = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": None}


@dataclass(frozen=True)
class RecipeRun:
    """The training that a recipe describes."""

    module: pl.LightningModule
    batch: Any
    """One batch of the recipe's shapes, or a real one from its own loader, in host memory."""
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
    notes: tuple[str, ...] = ()
    """What the user should know of how the module and the batch were made."""
    example: str = ""
    """Whose example the batch is, as a sentence; empty for real batches, and shapes that were given."""
    device_numbers: tuple[int, ...] | None = None
    """Numbers of the devices that the recipe takes on each machine; None if it takes all that exist."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The recipe's whole configuration as plain values."""
        return plain(*self.parsed)

    @property
    def batching(self) -> Any:
        """The recipe's `MicroBatching`; None if it has none."""
        own = (one for one in self.callbacks if type(one).__name__ == "MicroBatching")
        return next((one for one in own if type(one).__module__.startswith("lightning_memfit.")), None)

    def sizes(self, replicas: int, asked: int | None = None) -> tuple[int, int, int]:
        """Samples that the loader gives a device at once, those of a micro-batch, and micro-batches of a step.

        `MicroBatching` may set what the loader gives. At `auto` it cuts as few micro-batches as fit, which are taken
        for the whole batch.
        """
        accumulate = self.options.accumulate_grad_batches
        whole = getattr(self.batching, "global_batch_size", None)
        loaded = batch_size(self.batch) if whole is None else max(1, int(whole) // (replicas * accumulate))
        cut: Any = "auto" if self.batching is None else self.batching.options.micro_batch_size
        size: int = loaded if cut == "auto" else min(asked or cut, loaded)
        return loaded, size, accumulate * -(-loaded // size)

    @property
    def data_arguments(self) -> dict[str, Any]:
        """What the recipe gives its data module."""
        return (self.config.get("data") or {}).get("init_args") or {}

    @property
    def takes_batch_size(self) -> bool:
        """Whether the data module has an argument `batch_size`."""
        return "batch_size" in self.data_arguments

    @property
    def other_rows(self) -> str:
        """What to say where a batch has other than `batch_size` rows; empty where it has as many.

        Packed sequences, several views of a sample and sequences whose first dimension is time are such: nobody knows
        how many rows another size would give.
        """
        said, rows = self.data_arguments.get("batch_size"), batch_size(self.batch)
        if not isinstance(said, int) or said == rows:
            return ""
        return (
            f"`data.batch_size={said}`, and a batch has {rows} rows, so that it can't be told what another size would "
            "load"
        )


class _RecipeCLI(MemFitCLI):
    """Instantiates everything, with a Trainer that runs anywhere and writes nothing."""

    def __init__(self, arguments: list[str], weights: bool, context: ExitStack) -> None:
        self._weights, self._context = weights, context
        self._is_without_weights = False
        self.example = ""
        super().__init__(arguments, run=False, save_config_callback=None)

    @override
    def import_classes(self, arguments: Sequence[str]) -> None:
        """Import only those that are named: an estimate has no use for most of the package."""
        texts = [Path(one).read_text("utf-8", "replace") for one in configs_of(arguments) if Path(one).is_file()]
        words = {word for text in (*arguments, *texts) for word in re.findall(r"\w+", text)}
        for name in words & set(lightning_memfit.__all__):
            getattr(lightning_memfit, name)

    @override
    def parse_plan(self, parser: LightningArgumentParser, arguments: list[str]) -> Namespace:
        """Parse arguments, and again with all classes imported where a file that another names has a bare name."""
        try:
            return super().parse_plan(parser, arguments)
        except ArgumentError:
            import_public_names()
            return super().parse_plan(parser, arguments)

    @override
    def before_instantiate_classes(self) -> None:
        """Record the recipe's hardware, precision and loggers, and replace them by stand-ins; leave out weights."""
        if not self._weights and _may_load_weights(self.config.get("model")):
            from lightning_memfit.estimate.pretrained import without_weights

            self._context.enter_context(without_weights())
            self._is_without_weights = True
        self.as_written = self.config.clone()
        trainer = self.config.trainer
        self.recipe = {name: trainer[name] for name in _STAND_IN}
        for name, value in _STAND_IN.items():
            trainer[name] = value
        trainer.logger = False
        trainer.enable_progress_bar = False

    @override
    def instantiate_classes(self) -> None:
        """Make everything, without weights: torch names the meta device where it can't do something without values."""
        try:
            super().instantiate_classes()
        except Exception as error:
            told = " ".join(map(str, error_chain(error)))
            if not (self._is_without_weights and re.search(r"\bmeta\b", told, re.IGNORECASE)):
                raise
            raise ValueError(
                f"{_reads_weights(error)}. Move that line to `configure_model`, where a value is assumed."
            ) from error


def _reads_weights(error: Exception) -> str:
    """Say which line of the user's reads values of pretrained weights, which an estimate doesn't load."""
    from lightning_memfit.profile.culprit import Culprit

    places = [place for one in error_chain(error) if (place := Culprit.of(one).place)]  # jsonargparse's is the first
    return f"{places[-1] if places else 'the model'} reads values of pretrained weights, which are not loaded here"


def _may_load_weights(model: Any) -> bool:
    """Whether a model's class, or one that it is derived from, stands in a file that names transformers."""
    module, _, name = str((model or {}).get("class_path")).rpartition(".")
    kind = getattr(import_module(module), name, None) if module else None
    files = {getattr(sys.modules.get(base.__module__), "__file__", None) for base in getattr(kind, "__mro__", ())}
    own = (file for file in files if file is not None and "/torch/" not in file and "/lightning/" not in file)
    return any("transformers" in Path(file).read_text(encoding="utf-8", errors="replace") for file in own)


@contextmanager
def load_recipe(
    arguments: list[str], batch_shape: str | None = None, real_batch: bool = False, weights: bool = False
) -> Iterator[RecipeRun]:
    """Instantiate a recipe, make or fetch a batch, and yield both, for as long as models come without weights."""
    if batch_shape is not None and real_batch:
        raise ValueError("`--batch-shape` and `--real-batch` both say where the batch comes from. Drop one.")
    shaped = parse_batch_shape(batch_shape) if batch_shape is not None else None
    with ExitStack() as context:
        yield _loaded(_RecipeCLI(arguments, weights, context), shaped, real_batch)


def _loaded(cli: _RecipeCLI, shaped: Any, real_batch: bool) -> RecipeRun:
    trainer, recipe = cli.trainer, cli.recipe
    if isinstance(cli.model, CausalLM):
        _ = cli.model.architecture  # read it here once, not in every trace of a copy
    own = [one for one in (trainer.precision_plugin,) if isinstance(one, TechniquePrecision)]
    callbacks = (*trainer.callbacks, *own)  # type: ignore[attr-defined]
    options = StepOptions(
        own[0].precision if own else _precision(recipe["precision"]),
        trainer.accumulate_grad_batches,
        trainer.gradient_clip_val,
        trainer.gradient_clip_algorithm,
    )
    if not 1 <= recipe["num_nodes"] <= LARGEST_COUNT:
        raise ValueError(f"`trainer.num_nodes={recipe['num_nodes']}` must be from 1 to {LARGEST_COUNT:,}.")
    numbers = device_numbers(recipe["devices"])
    processes = len(numbers or (0,)) * recipe["num_nodes"]
    with isolate_rng():
        batch = _batch(cli, processes, shaped, real_batch)
    cli.model.trainer = trainer  # the training step may use its data module
    return RecipeRun(
        cli.model,
        batch,
        options,
        callbacks,
        str(recipe["accelerator"]),
        recipe["strategy"],
        None if numbers is None else len(numbers),
        recipe["num_nodes"],
        (cli.parser, cli.as_written),
        (),
        cli.example,
        numbers,
    )


def _precision(value: Any) -> Precision:
    if value is None:
        return "32-true"
    if str(value) not in _PRECISIONS:
        raise ValueError(f"`trainer.precision={value!r}` can't be estimated. Known: {', '.join(_PRECISIONS)}.")
    return _PRECISIONS[str(value)]


def device_numbers(devices: Any) -> tuple[int, ...] | None:
    """Return the numbers of the devices that the Trainer's `devices` names or counts; None for all that exist."""
    text = str(devices)
    if text in ("auto", "-1"):
        return None
    if "," not in text and not isinstance(devices, (list, tuple)):
        if text.isdecimal() and 1 <= int(text) <= _MOST_DEVICES:
            return tuple(range(int(text)))
        raise ValueError(f"`trainer.devices={devices}` must be from 1 to {_MOST_DEVICES:,}, or -1 for all that exist.")
    named = devices if isinstance(devices, (list, tuple)) else [part for part in text.split(",") if part.strip()]
    try:
        return tuple(map(int, named))  # "1," is device 1 alone
    except ValueError:
        raise ValueError(f"`trainer.devices={named}` must be numbers of devices, for example [0, 1].") from None


# --- data -------------------------------------------------------------------------------------------------------------


class _PlannedTrainer:
    """The stand-in Trainer as data modules see it, with the number of processes that the recipe asks for."""

    def __init__(self, trainer: pl.Trainer, world_size: int) -> None:
        self._trainer = trainer
        self.world_size = world_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


_SHAPE = re.compile(r"(?:(?P<name>\w+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<kind>\w+))?")
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


def parse_batch_shape(text: str) -> Any:
    """Make a batch of the given shapes, filled with ones.

    It is written `input_ids=4x128:int64,labels=4:int64` for a dictionary, `4x3x224x224,4:int64` for a list, or one
    shape for a tensor. The first size is the micro-batch; the type is float32 where none is named.
    """
    option, tensors = f"`--batch-shape {text}`", []
    for part in text.split(","):
        found = _SHAPE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{option}: {part!r} is no shape. Write NAME=4x128:int64, or 4x3x224x224 without a name.")
        kind, sizes = found["kind"] or "float32", [int(size) for size in found["sizes"].split("x")]
        if kind not in _DTYPES:
            raise ValueError(f"{option}: {kind!r} is no type. Choose from: {', '.join(_DTYPES)}.")
        if not 1 <= math.prod(sizes) <= LARGEST_COUNT:
            raise ValueError(f"{option}: {part!r} must have from 1 to {LARGEST_COUNT:,} elements.")
        tensors.append((found["name"], torch.ones(sizes, dtype=getattr(torch, kind))))
    names = [name for name, _ in tensors]
    if all(names) and len(set(names)) == len(names):
        return dict(tensors)
    if any(names):
        raise ValueError(f"{option}: give every tensor a name of its own, or none.")
    return [tensor for _, tensor in tensors] if len(tensors) > 1 else tensors[0][1]


def _batch(cli: _RecipeCLI, processes: int, shaped: Any, real: bool) -> Any:
    """Return a batch: of the shapes that the user or the data module knows, or else the first real one."""
    data = cli.datamodule
    example = None if shaped is not None else getattr(data, "example_batch", None)
    if real or (shaped is None and example is None):
        return _first_batch(cli, processes)
    if data is None:
        return shaped
    data.trainer = _PlannedTrainer(cli.trainer, processes)
    if example is not None:
        kind, architecture = type(data).__name__, getattr(cli.model, "architecture", None)
        cli.example = f"The batch was made by `example_batch` of {kind}, without data; `--real-batch` reads one."
        shaped = example(getattr(architecture, "vocab_size", None))
    cli.trainer.datamodule = data  # type: ignore[attr-defined]
    return data.on_after_batch_transfer(data.on_before_batch_transfer(shaped, 0), 0)


def _first_batch(cli: _RecipeCLI, processes: int) -> Any:
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
        if isinstance(loader, DataLoader):  # starting workers for one batch would take longer than the estimate
            loader.num_workers = 0
            loader.timeout = 0
    try:
        batch, _, _ = next(iter(combined))
    except StopIteration:
        raise ValueError("The recipe's training loader gives no batch: it is empty.") from None
    if data is not None:
        cli.trainer.datamodule = data  # type: ignore[attr-defined]
        batch = data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)
    return batch
