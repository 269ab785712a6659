"""`TraceStore`: profiles of a workload's training step under settings, each traced once and kept on disk.

A setting's step is never traced whole. Forward and backward (`passes`) and the optimizer's step (`stepping`) are traced
apart, and `planner.memory` puts a setting's memory together from the two. `exactly` is the exception: it traces a
complete setting to verify a plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch

from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.estimate.division import Division
from lightning_memfit.estimate.steady_state import SteadyState
from lightning_memfit.memory import Category
from lightning_memfit.planner.plan import label
from lightning_memfit.planner.workload import Workload
from lightning_memfit.profile.build import batch_size, profile_module, resize_batch
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.process import import_too
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, TraceError
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.technique import CallbackSpec, Kind
from lightning_memfit.techniques.mixed_precision import BF16_TRUE, technique_for

CHOICES: tuple[Choice, ...] = ("none", "full", "keep_matmul_attention")
"""The checkpointing choices that a plan mixes: keep everything, nothing, or only what is expensive to recompute."""

_TRACED_SIZE = 2
"""Samples in a trace: memory is laid out differently for one sample; two and three give the line for larger batches."""

_FEW_BLOCKS, _MORE_BLOCKS = 3, 5
"""Numbers of blocks with which the optimizer step is traced if a module has many equal ones."""

_LARGEST_CHUNK = 1 << 25
"""Number of elements: optimizers step smaller blocks in shared chunks (`Float32Step`), so that they don't add up."""


class NotTraced(TraceError):
    """A profile was asked of a store that makes none."""


class TraceStore:
    """Make and keep the profiles of a workload under settings.

    What runs in forward and backward (precision, loss, adapter, checkpointing) and how the optimizer steps are traced
    apart, so that `p` kinds of passes and `o` optimizers take `p + o` traces instead of `p x o`.

    Attributes:
        on_trace: Is told in words what is about to be traced.

    Args:
        workload: What is trained.
        cache: Where profiles are kept between runs; none by default.
    """

    def __init__(self, workload: Workload, cache: ProfileCache | None = None) -> None:
        self.workload = workload
        self.on_trace: Callable[[str], object] = str
        self._cache = cache
        self._known: dict[tuple[Any, ...], ModelProfile] = {}
        self._refused: dict[tuple[Any, ...], TraceError] = {}
        self._not_extended: set[Setting] = set()
        self._may_trace = True
        size = batch_size(workload.batch)
        self._batch = resize_batch(workload.batch, size, _TRACED_SIZE)
        self._emulation = Emulation(workload.target.kind, workload.target.capability)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Make no more traces: what would need one raises `NotTraced`."""
        self._may_trace = False
        try:
            yield
        finally:
            self._may_trace = True

    def of(self, workload: Workload) -> TraceStore:
        """A store for a workload with another batch, which shares nothing with this one but what lies on disk."""
        other = TraceStore(workload, self._cache)
        other.on_trace = self.on_trace
        return other

    def plain(self) -> ModelProfile:
        """The step in the recipe's precision, with its own adapters and no other technique.

        What is trained by adapters may have no step without them, as where the model without is a reference.

        Values that it has to assume are checked here, once for all settings: they are those of the step, whatever
        techniques run with it.

        Raises:
            TraceError: If it can't be traced, or what it allocates depends on such values.
        """
        adapter = self.workload.adapter
        callbacks = () if adapter is None else Setting(chosen=(adapter,)).traced_callbacks()
        options = self._options(self.workload.options.precision)
        return self._profile(("plain",), self._whole_step(options, callbacks, check_assumptions=True))

    def passes(self, setting: Setting, choice: Choice) -> ModelProfile:
        """The step with what a setting does in forward and backward, all blocks following one checkpointing choice.

        The optimizer is the module's own, and two micro-batches are accumulated.

        Raises:
            TraceError: If it can't be traced.
        """
        pure = passes_of(setting)
        callbacks = (*pure.traced_callbacks(), *_checkpointing(choice))
        return self._profile(("passes", pure, choice), self._whole_step(self._options(pure.precision), callbacks))

    def has_passes(self, setting: Setting, choice: Choice) -> bool:
        """Whether `passes` needs no further trace."""
        return ("passes", passes_of(setting), choice) in self._known

    def stepping(self, setting: Setting, rounding: int) -> SteadyState:
        """What the optimizer's steps alone, over all parameters, keep and need.

        If there are many equal blocks, two small numbers of them are traced and extrapolated, unless a technique names
        parts of the module, which may be in any block, or finds no such part in the first few.

        Args:
            setting: Only its optimizer, precision and gradient technique count.
            rounding: Rounding of the allocator, in bytes.

        Raises:
            TraceError: If it can't be traced.
        """
        pure = stepping_of(setting)
        plain = self.plain()
        elements_per_block = plain.num_parameters // max(1, plain.num_blocks)
        are_few = plain.traced_blocks == plain.num_blocks or elements_per_block * _FEW_BLOCKS < _LARGEST_CHUNK
        if not are_few and not _names_parts(pure) and pure not in self._not_extended:
            import_too([choice.technique.package for choice in pure.chosen if choice.technique.package])
            try:
                few, more = (SteadyState.of(self._stepping(pure, n), rounding) for n in (_FEW_BLOCKS, _MORE_BLOCKS))
                return few.extended(more, _FEW_BLOCKS, _MORE_BLOCKS, plain.num_blocks)
            except NotTraced:
                raise
            except TraceError:  # many settings step alike
                self._not_extended.add(pure)
        return SteadyState.of(self._stepping(pure, None), rounding)

    def rounded_bytes(self) -> dict[Category, int]:
        """Bytes of what is not trained and a conversion to half precision would round, as the module holds it now.

        What `configure_model` makes is not among it: a run in half precision makes it so.
        """
        wide = (torch.float32, torch.float64)
        frozen = {parameter.name for parameter in self.plain().parameters if not parameter.trainable}
        weights = [weight for name, weight in self.workload.module.named_parameters() if name in frozen]
        return {
            Category.PARAMETER: sum(weight.nbytes for weight in weights if weight.dtype in wide),
            Category.BUFFER: sum(buffer.nbytes for buffer in self.workload.module.buffers() if buffer.dtype in wide),
        }

    def _stepping(self, pure: Setting, num_blocks: int | None) -> ModelProfile:
        settings = self._settings(self._options(pure.precision, 1), pure.traced_callbacks(), any_size=False)
        step = partial(_profile_steps, self.workload.module, num_blocks, self._batch, shorten=False, **settings)
        return self._profile(("stepping", pure, num_blocks), step)

    def exactly(self, setting: Setting, division: Division | None = None) -> ModelProfile:
        """The step of a complete setting at its own micro-batch, with all of its techniques applied.

        Args:
            setting: A setting with its sizes.
            division: How its strategy divides the run; the profile is that of a rank if the strategy is traced itself.

        Raises:
            TraceError: If it can't be traced.
        """
        assert setting.micro_batch_size is not None
        batch = resize_batch(self._batch, _TRACED_SIZE, setting.micro_batch_size)
        precision: Any = setting.precision if division is None else division.traced_precision(setting.precision)
        # Under DDP `MicroBatching` synchronizes no pass, as Lightning does none but the last.
        is_cut = setting.sharding is not None and setting.sharding.stage == 0 and self.workload.is_cut(setting)
        options = self._options(precision, 2 if is_cut else min(2, setting.accumulate_grad_batches))
        alone = Setting(chosen=setting.chosen)
        ranks = _ranks(setting, division) if division is not None and division.traced else None
        settings = self._settings(options, alone.traced_callbacks(), any_size=False)
        self.on_trace(f"the whole of {label(setting)}")
        return self._traced(partial(profile_module, self.workload.module, batch, ranks=ranks, **settings))

    def _options(self, precision: Any, accumulate: int = 2) -> StepOptions:
        own = self.workload.options
        return StepOptions(precision, accumulate, own.gradient_clip_val, own.gradient_clip_algorithm)

    def _whole_step(
        self, options: StepOptions, callbacks: tuple[Any, ...], check_assumptions: bool = False
    ) -> Callable[[], ModelProfile]:
        """What traces forward, backward and step at two sizes."""
        settings = self._settings(options, callbacks, check_assumptions=check_assumptions)
        return partial(profile_module, self.workload.module, self._batch, **settings)

    def _settings(
        self,
        options: StepOptions,
        callbacks: tuple[Any, ...],
        any_size: bool = True,
        check_assumptions: bool = False,
    ) -> dict[str, Any]:
        return {
            "options": options,
            "emulation": self._emulation,
            "callbacks": (*self.workload.fixed, *callbacks),
            "any_micro_batch": any_size,
            "check_assumptions": check_assumptions,
            "cache": self._cache,
        }

    def _profile(self, key: tuple[Any, ...], profile: Callable[[], ModelProfile]) -> ModelProfile:
        if key in self._refused:
            raise self._refused[key]
        if key not in self._known:
            if not self._may_trace:
                raise NotTraced(f"The search traced no {_words(key)}.")
            self.on_trace(_words(key))
            try:
                self._known[key] = self._traced(profile)
            except TraceError as error:  # many settings share what can't be traced
                self._refused[key] = error
                raise
        return self._known[key]

    def _traced(self, profile: Callable[[], ModelProfile]) -> ModelProfile:
        found = profile()
        # A `MemoryLimit` doesn't see what kernels give back before they end, and a plan for it must not, either.
        return found.without_scratch() if self.workload.target.counts_tensors else found


def _names_parts(setting: Setting) -> bool:
    """Whether a choice has lists among its options, as those of layers are."""
    return any(isinstance(value, (list, tuple)) for choice in setting.chosen for value in choice.options.values())


def _profile_steps(module: Any, num_blocks: int | None, batch: Any, **settings: Any) -> ModelProfile:
    """Profile the optimizer's steps alone; see `TraceStore.stepping`."""
    return profile_module(only_stepping(module, num_blocks), batch, **settings)


def _words(key: tuple[Any, ...]) -> str:
    """What a key of a profile stands for."""
    kind, *of = key
    if kind == "plain":
        return "the module's own step"
    if kind == "stepping":
        return f"the optimizer's step of {label(of[0])}"
    return f"forward and backward of {label(of[0])}" + (f", blocks on {of[1]}" if of[1] != "none" else "")


def _ranks(setting: Setting, division: Division) -> Ranks:
    """The ranks of a run under a setting's strategy."""
    strategy = setting.of_kind("strategy")
    assert strategy is not None
    configured = strategy.technique.configured(**strategy.options)[0]["strategy"]
    spec = CallbackSpec(configured["class_path"], configured.get("init_args", {}))
    make = partial(spec.load(), **spec.init_args)
    return Ranks(make, division.ranks, 0, division.ranks_per_machine)


_NOT_IN_PASSES: tuple[Kind, ...] = ("optimizer", "gradient", "checkpointing", "strategy")


@lru_cache(1 << 12)
def passes_of(setting: Setting) -> Setting:
    """Reduce a setting to what decides forward and backward; Lightning's precision replaces techniques built on it.

    DeepSpeed computes in the weights' own half precision, whatever Lightning calls it.
    """
    pure = Setting(chosen=setting.chosen)
    for kind in _NOT_IN_PASSES:
        pure = pure.without(kind)
    precision = setting.of_kind("precision")
    if setting.sharding is not None and setting.sharding.weight_bytes(setting.precision) == 2:
        return pure.without("precision").choose(BF16_TRUE.name)
    if precision is None or not precision.technique.changes_step:
        return pure
    return pure.without("precision").choose(technique_for(precision.technique.trainer["precision"]).name)


@lru_cache(1 << 12)
def stepping_of(setting: Setting) -> Setting:
    """Reduce a setting to what decides how the optimizer steps. Paged states are as large as others."""
    kinds = ("adapter", "optimizer", "precision", "gradient")
    pure = Setting(chosen=tuple(choice for choice in setting.chosen if choice.technique.kind in kinds))
    optimizer = pure.of_kind("optimizer")
    same = optimizer.technique.same_step_as if optimizer is not None else ""
    return pure.choose(same) if same else pure


def only_stepping(module: Any, num_blocks: int | None = None) -> Any:
    """A shallow copy of a module whose training step gives every parameter a gradient and does nothing else.

    Args:
        module: LightningModule, which is not changed, as only a copy of the copy configures itself.
        num_blocks: How many of its repeated blocks are kept; all by default.
    """
    base = type(module)

    def configure_model(self: Any) -> None:
        base.configure_model(self)
        if num_blocks is not None:
            _keep_blocks(self, num_blocks)

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # Where there are no forks, it is sent to another process, which doesn't have this class.
        return _remade, (base, num_blocks), *tuple(object.__reduce_ex__(self, 2))[2:]

    alike = copy.copy(module)
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:  # a copy loses it, and with it callbacks that keep something, such as averages of weights
        alike.trainer = trainer
    changed = {"training_step": _sum_of_parameters, "configure_model": configure_model, "__reduce_ex__": reduce}
    alike.__class__ = type(f"Stepping{base.__name__}", (base,), changed)
    alike.memfit_num_blocks = num_blocks  # simple attributes are part of a profile's key
    return alike


def _remade(base: Any, num_blocks: int | None) -> Any:
    """What `only_stepping` makes of a module of this class, without its attributes."""
    return only_stepping(base.__new__(base), num_blocks)


def _keep_blocks(module: Any, num_blocks: int) -> None:
    """Remove all but the first of the largest group of repeated blocks."""
    group = max(find_blocks(module), key=lambda candidate: candidate.num_parameters)
    container = module.get_submodule(group.container)
    for name in group.names[num_blocks:]:
        del container._modules[name.rpartition(".")[2]]


def _sum_of_parameters(module: Any, batch: Any, batch_idx: int) -> Any:
    return sum(parameter.sum() for parameter in module.parameters() if parameter.requires_grad)


def _checkpointing(choice: Choice) -> tuple[Any, ...]:
    if choice == "none":
        return ()
    if choice == "full":
        return (ActivationCheckpointing(),)
    return (ActivationCheckpointing("selective", keep=("matmul", "attention")),)
