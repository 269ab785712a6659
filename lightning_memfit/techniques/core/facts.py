"""`Facts` about a module and its device, and `Run`: facts and choices together, which the rules of techniques read.

Both are plain data, so that a rule gives the same answer for a plan that has not run and for a Trainer about to begin.
`run_facts` reads facts off a module, `run_of` a run off a Trainer. What only the layers of a module show, plans read
beforehand (`core.model_facts`), and a run finds when a technique is applied.
"""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from lightning_memfit.extras import is_installed
from lightning_memfit.memory.kind import CUDA, DeviceKind, compute_capability
from lightning_memfit.techniques.core.hooks import gradient_hooks

Options = Mapping[str, Any]
"""Arguments by name."""


@dataclass(frozen=True)
class LoaderFacts:
    """What decides whether a training loader can have workers."""

    name: str = "DataLoader"
    """Its class; whether it is a `torch.utils.data.DataLoader` says `settable`."""
    settable: bool = True
    iterable: str = ""
    """Class of its data set if that is an IterableDataset."""

    @classmethod
    def of(cls, loader: Any) -> LoaderFacts:
        """Read them off a loader, without iterating over it."""
        if not isinstance(loader, DataLoader):
            return cls(type(loader).__name__, settable=False)
        iterable = type(loader.dataset).__name__ if isinstance(loader.dataset, IterableDataset) else ""
        return cls(type(loader).__name__, True, iterable)


@dataclass(frozen=True)
class Facts:
    """What no choice of technique changes. None means that it is not known.

    That is so before the model is built, and in a run for what only the layers show.
    """

    device: str = CUDA
    """Device type."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    automatic_optimization: bool = True
    gradient_hooks: tuple[tuple[str, str], ...] = ()
    """Hooks of the module, and after these of callbacks, that look at gradients: by name, and whose they are."""
    optimizers: tuple[str, ...] = ()
    """Class names of the module's own optimizers; empty if they are not known."""
    groups: tuple[tuple[str, Options], ...] = field(default=(), hash=False)
    """Package and class, as `torch.AdamW`, and hyper-parameters of each parameter group; empty if not known."""
    num_blocks: int | None = None
    """Number of repeated blocks found."""
    causal_lm: bool | None = None
    """Whether there is a Hugging Face language model, causal or encoder-decoder, with a linear head."""
    hugging_face: bool | None = None
    """Whether there is a `transformers.PreTrainedModel`."""
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    loaders: tuple[LoaderFacts, ...] = ()
    """Every training loader; empty if they are not known."""
    compiler: bool | None = None
    """Whether the machine has what torch.compile needs."""
    callbacks: tuple[str, ...] = ()
    """Class names of the Trainer's callbacks that are no techniques, such as `MemoryLimit`."""
    attention: frozenset[str] | None = None
    """Which of torch's own implementations of attention every Hugging Face model can switch to."""
    mlp_width: int | None = None
    """Features of a token that goes into the narrowest feed-forward layer; 0 where none is known by its class."""
    sequence_length: int | None = None
    """Tokens of a sample, in plans alone; 0 where samples are no sequences of tokens."""
    batch_statistics: tuple[str, ...] = ()
    """Names of layers that normalise with statistics of their micro-batch while training."""

    def who_looks(self, *hooks: str) -> str | None:
        """Words for the first hook of these names that looks at gradients; None if there is none."""
        return next((who for hook, who in self.gradient_hooks if hook in hooks), None)

    def why_not_own_backward(self, technique: str) -> str | None:
        """Reason and fix if the module has its own `backward`, for a technique that takes gradients away in a pass."""
        if self.who_looks("backward") is None:
            return None
        return (
            "the module's `backward` may run several backward passes, or read and change gradients, which "
            f"{technique} takes away during each pass. Remove it, or leave {technique} out."
        )

    @property
    def device_kind(self) -> DeviceKind:
        """Properties of the device's type."""
        return DeviceKind.of(self.device)


@dataclass(frozen=True)
class Run:
    """What techniques need to know of a run: made from a `Setting`, or from a Trainer (`run_of`)."""

    facts: Facts = field(default_factory=Facts)
    precision: str = "32-true"
    """Lightning's name of the precision."""
    accumulate_grad_batches: int = 1
    """Backward passes per optimizer step, by whichever loop."""
    strategy: str = "SingleDeviceStrategy"
    """Class name of the strategy."""
    zero_3: bool = False
    """Whether DeepSpeed partitions weights, and gathers them only while their own module runs."""
    world_size: int = 1
    callbacks: tuple[str, ...] = ()
    """Class names of all callbacks, in order, and of a technique's precision; the techniques' among them."""
    arguments: Mapping[str, Options] = field(default_factory=dict, hash=False)
    """Arguments of the techniques' callbacks by class name, defaults included."""

    def has(self, name: str) -> bool:
        """Whether a callback of this class takes part."""
        return name in self.callbacks

    def beside(self, conflicts: Mapping[str, str]) -> str | None:
        """Reason and fix for the first callback of a table, which says of each class why it can't take part."""
        return next(
            (f"with {name}: {why} Leave {name} out." for name, why in conflicts.items() if self.has(name)), None
        )


def run_facts(
    module: nn.Module,
    device: str = CUDA,
    capability: tuple[int, int] | None = None,
    optimizer: str | Optimizer = "",
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    loader: Any = None,
    callbacks: Sequence[Any] = (),
) -> Facts:
    """Facts of a module, whether `configure_model` has built its layers yet or not."""
    groups: tuple[tuple[str, Options], ...] = ()
    if isinstance(optimizer, Optimizer):
        from lightning_memfit.memory.parameters import groups_of  # no run gives its own

        groups, optimizer = groups_of(optimizer), type(optimizer).__name__
    return Facts(
        device=device,
        capability=capability,
        automatic_optimization=getattr(module, "automatic_optimization", True),
        gradient_hooks=tuple(gradient_hooks(module, callbacks)),
        optimizers=tuple(optimizer.split(" + ")) if optimizer else (),
        groups=groups,
        gradient_clip_val=gradient_clip_val,
        gradient_clip_algorithm=str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm"),
        loaders=tuple(LoaderFacts.of(one) for one in flat_loaders(loader)),
        compiler=has_compiler(device),
        callbacks=tuple(type(callback).__name__ for callback in callbacks if not hasattr(callback, "refusal")),
        batch_statistics=tuple(batch_statistics(module)),
    )


def batch_statistics(module: nn.Module) -> list[str]:
    """Return the names of layers that normalise with statistics of the batch while training."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training
    ]


def run_of(trainer: Any, module: Any) -> Run:
    """The run that a Trainer is about to begin with a module."""
    device = trainer.strategy.root_device
    given = [*trainer.callbacks, *(one for one in (trainer.precision_plugin,) if hasattr(one, "refusal"))]
    techniques = [one for one in given if hasattr(one, "refusal")]
    # The loaders that `fit` was given; a module or data module makes them later.
    source = getattr(trainer.fit_loop._data_source, "instance", None)
    facts = run_facts(
        module,
        device.type,
        compute_capability(device),
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        loader=None if source is None or hasattr(source, "train_dataloader") else source,
        callbacks=trainer.callbacks,
    )
    return Run(
        facts,
        precision=trainer.precision,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        strategy=_strategy(trainer.strategy),
        zero_3=bool(getattr(trainer.strategy, "zero_stage_3", False)),
        world_size=trainer.world_size,
        callbacks=tuple(type(one).__name__ for one in given),
        arguments={type(callback).__name__: arguments_of(callback) for callback in techniques},
    )


def flat_loaders(source: Any) -> list[Any]:
    """The loaders in what a Trainer gets: one, or a collection of them."""
    found = source.flattened if isinstance(source, CombinedLoader) else tree_leaves(source)
    return [loader for loader in found if loader is not None]


@functools.cache
def defaults_of(cls: Any) -> Options:
    """Parameters of a callback's class by name, with their defaults."""
    parameters = inspect.signature(cls).parameters.values()
    return {one.name: None if one.default is one.empty else one.default for one in parameters}


def arguments_of(callback: Any) -> Options:
    """A callback's arguments, which it keeps under their own names."""
    cls: Any = type(callback)
    return {name: getattr(callback, name) for name in defaults_of(cls) if hasattr(callback, name)}


def _strategy(strategy: Any) -> str:
    """Name of the strategy's kind; DeepSpeed's strategy derives from DDP's but is not one."""
    kinds = (SingleDeviceStrategy, DeepSpeedStrategy, DDPStrategy, ModelParallelStrategy)
    return next((kind.__name__ for kind in kinds if isinstance(strategy, kind)), type(strategy).__name__)


def has_compiler(device: str) -> bool:
    """Whether torch.compile finds the compiler it needs: Triton on CUDA, a C++ compiler on the CPU."""
    if DeviceKind.of(device).compiles_with_triton:
        return is_installed("triton")
    return any(shutil.which(name) is not None for name in ("g++", "clang++", "c++"))
