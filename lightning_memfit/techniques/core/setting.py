"""`Setting`: everything that is chosen for a run, as one frozen record that renders itself as YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from typing_extensions import override

from lightning_memfit.profile.step import Precision, StepOptions
from lightning_memfit.techniques.core.cost import Cost
from lightning_memfit.techniques.core.facts import Facts, Run, arguments_of
from lightning_memfit.techniques.core.registry import find_technique, techniques
from lightning_memfit.techniques.core.sharding import Sharding
from lightning_memfit.techniques.core.technique import KINDS, CallbackSpec, Kind, Numerics, Technique, overlay
from lightning_memfit.techniques.mixed_precision import technique_for

MICRO_BATCHING = "micro_batching"


@dataclass(frozen=True)
class TechniqueChoice:
    """A technique with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Store options as JSON would return them, so that a saved setting equals itself."""
        object.__setattr__(self, "options", json.loads(self._text))

    @override
    def __hash__(self) -> int:
        return hash((self.name, self._text))

    @cached_property
    def _text(self) -> str:
        """The options as JSON; a search asks for the hash of its settings a hundred thousand times."""
        return json.dumps(dict(self.options), sort_keys=True)

    @property
    def technique(self) -> Technique:
        """The record of the technique."""
        return find_technique(self.name)


@dataclass(frozen=True)
class Setting:
    """All choices of a run. Equal choices make equal settings, in whatever order they were made.

    Strategies (DDP, FSDP2, DeepSpeed with its stage and offload targets) are techniques of kind `strategy`.
    """

    micro_batch_size: int | None = None
    """Samples per forward pass; None leaves the loader's batch whole."""
    accumulate_grad_batches: int = 1
    """Micro-batches per optimizer step and device."""
    chosen: tuple[TechniqueChoice, ...] = ()
    """Choices in the order of `KINDS`; at most one per kind."""
    world_size: int = 1
    """Number of devices."""

    def __post_init__(self) -> None:
        """Put the choices in order.

        Raises:
            ValueError: If two are of one kind, a name is unknown, or a number is less than 1.
        """
        for name in ("micro_batch_size", "accumulate_grad_batches", "world_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1.")
        by_kind: dict[Kind, TechniqueChoice] = {}
        for choice in self.chosen:
            other = by_kind.setdefault(choice.technique.kind, choice)
            if other is not choice:
                raise ValueError(
                    f"{other.name} and {choice.name} both decide the {choice.technique.kind}. Leave one of them out."
                )
        object.__setattr__(self, "chosen", tuple(by_kind[kind] for kind in KINDS if kind in by_kind))

    # --- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, name: str, **options: Any) -> Setting:
        """This setting with a technique in place of the one that decided the same thing before.

        Raises:
            ValueError: If there is no such technique.
        """
        kind = find_technique(name).kind
        others = tuple(choice for choice in self.chosen if choice.technique.kind != kind)
        return replace(self, chosen=(*others, TechniqueChoice(name, options)))

    def without(self, kind: Kind) -> Setting:
        """This setting without any choice of a kind."""
        return replace(self, chosen=tuple(choice for choice in self.chosen if choice.technique.kind != kind))

    def without_sizes(self) -> Setting:
        """The techniques, for any micro-batch."""
        return replace(self, micro_batch_size=None, accumulate_grad_batches=1)

    def has(self, name: str) -> bool:
        """Whether a technique is chosen."""
        return any(choice.name == name for choice in self._complete)

    def of_kind(self, kind: Kind) -> TechniqueChoice | None:
        """The technique of a kind, if one is chosen."""
        return next((choice for choice in self._complete if choice.technique.kind == kind), None)

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step over all devices; None if the loader decides."""
        if self.micro_batch_size is None:
            return None
        return self.micro_batch_size * self.accumulate_grad_batches * self.world_size

    @cached_property
    def precision(self) -> Precision:
        """Lightning's name of the precision."""
        precision: Precision = self._trainer_options().get("precision", "32-true")
        return precision

    @property
    def numerics(self) -> frozenset[Numerics]:
        """Everything that must be allowed for the setting; empty if all numbers equal those of the plain run."""
        return frozenset().union(*(technique.numerics for technique in self.techniques())) - {"exact"}

    def techniques(self) -> tuple[Technique, ...]:
        """Records of all chosen techniques, including micro-batching if batches are accumulated."""
        return tuple(choice.technique for choice in self._complete)

    @property
    def sharding(self) -> Sharding | None:
        """What the strategy divides and moves; None on one device that holds everything."""
        strategy = self.of_kind("strategy")
        return strategy.technique.sharding if strategy is not None else None

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are freed one by one during backward."""
        return any(technique.frees_gradients for technique in self.techniques())

    @property
    def masters_on_host(self) -> bool:
        """Whether a technique keeps fp32 weights, gradients and states in host memory; see `sharding` for DeepSpeed."""
        return any(technique.masters_on_host for technique in self.techniques())

    @property
    def pages_states(self) -> bool:
        """Whether optimizer states are in memory that moves to the host under pressure."""
        return any(technique.states is not None and technique.states.paged for technique in self.techniques())

    @property
    def changes_step(self) -> bool:
        """Whether the optimizer steps differently from the module's own, apart from what the strategy does."""
        return any(choice.technique.changes_step for choice in self.without("strategy").chosen)

    def cost(self, profile: Any) -> Cost:
        """What all techniques together add to the plain step of a profile, on each device."""
        total = Cost()
        for choice in self._complete:
            technique, options = choice.technique, dict(choice.options)
            if technique.kind == "strategy":
                options["precision"] = self.precision  # decides the size of what is moved
            cost = technique.cost(profile, options)
            if technique.kind == "optimizer" and self.sharding is not None and self.sharding.stage:
                cost = replace(cost, step=cost.step * (1 / self.world_size))  # a share is stepped
            total += cost
        return total

    # --- applying ---------------------------------------------------------------------------------------------------

    def callbacks(self) -> list[Any]:
        """New callbacks for a Trainer.

        Raises:
            ModuleNotFoundError: If a technique's package is missing.
        """
        return [callback for choice in self._complete for callback in choice.technique.build(**choice.options)]

    def traced_callbacks(self) -> tuple[Any, ...]:
        """New callbacks for `profile_module`: those that change what a step allocates."""
        traced = [choice for choice in self.chosen if choice.technique.traced]
        return tuple(callback for choice in traced for callback in choice.technique.build(**choice.options))

    def step_options(self, facts: Facts | None = None) -> StepOptions:
        """Options with which `profile_module` runs its step."""
        facts = facts or Facts()
        algorithm = facts.gradient_clip_algorithm if facts.gradient_clip_val else None
        return StepOptions(self.precision, self.accumulate_grad_batches, facts.gradient_clip_val, algorithm)

    def overlay(self) -> dict[str, Any]:
        """What `fit --config recipe.yaml --config plan.yaml` applies on top of a recipe."""
        specs = [spec for choice in self._complete for spec in choice.technique.configured(**choice.options)[1]]
        return overlay(self._trainer_options(), specs)

    def validate(self, facts: Facts) -> list[str]:
        """Every conflict, with the reason and the fix; empty if the setting can run."""
        run = self.run(facts)
        reasons = ((choice.name, choice.technique.refusal(run, choice.options)) for choice in self._complete)
        return [f"{name}: {reason}" for name, reason in reasons if reason is not None]

    def run(self, facts: Facts) -> Run:
        """Facts and choices together, for rules."""
        specs = [spec for choice in self._complete for spec in choice.technique.configured(**choice.options)[1]]
        strategy, sharding = self.of_kind("strategy"), self.sharding
        lightning = "SingleDeviceStrategy" if self.world_size == 1 else "DDPStrategy"  # Lightning's own default
        return Run(
            facts,
            self.precision,
            self.accumulate_grad_batches,
            strategy.technique.lightning_strategy if strategy is not None else lightning,
            sharding is not None and sharding.deepspeed and sharding.stage == 3,
            self.world_size,
            (*facts.callbacks, *(spec.name for spec in specs)),
            {spec.name: spec.arguments for spec in specs},
        )

    # --- storing ----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; equal settings give equal ones."""
        return {
            "micro_batch_size": self.micro_batch_size,
            "accumulate_grad_batches": self.accumulate_grad_batches,
            "world_size": self.world_size,
            "techniques": {choice.name: dict(choice.options) for choice in self.chosen},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Setting:
        """Read the values that `to_dict` returned.

        Raises:
            ValueError: If a technique is not known.
        """
        rest = {name: value for name, value in values.items() if name != "techniques"}
        chosen = tuple(TechniqueChoice(name, options or {}) for name, options in values.get("techniques", {}).items())
        return cls(chosen=chosen, **rest)

    @classmethod
    def from_callbacks(cls, callbacks: Sequence[Any], precision: str = "32-true") -> Setting:
        """Read the choices of a run off its callbacks and its precision; sizes and strategy are left out.

        Args:
            callbacks: Of a Trainer; those that are no technique's don't count.
            precision: Lightning's name.

        Raises:
            ValueError: If two decide the same thing, the precision has no record, or an argument is no plain data.
        """
        found = cls()
        for technique in techniques():
            ours = [next((c for c in callbacks if _is_made_by(spec, c)), None) for spec in technique.callbacks]
            if not ours or None in ours or technique.kind in ("batching", "loader"):
                continue
            if technique.trainer.get("precision", precision) != precision:
                continue
            options: dict[str, Any] = {}
            for spec, callback in zip(technique.callbacks, ours, strict=True):
                options |= {k: v for k, v in arguments_of(callback).items() if v != spec.arguments.get(k)}
            known = found.of_kind(technique.kind)
            # Of several records for one class, the one whose own arguments say most is meant.
            if known is None or _says(technique) > _says(known.technique):
                try:
                    found = found.choose(technique.name, **options)
                except TypeError as error:
                    raise ValueError(f"{technique.name} has arguments that are no plain data: {error}") from error
        if found.precision != precision:
            found = found.choose(technique_for(precision).name)
        return found

    @cached_property
    def _complete(self) -> tuple[TechniqueChoice, ...]:
        """The choices, with micro-batching added if the sizes need it, and the strategy given its number of devices."""
        chosen = tuple(self._with_devices(c) if c.technique.kind == "strategy" else c for c in self.chosen)
        batching = next((choice for choice in chosen if choice.technique.kind == "batching"), None)
        if batching is None and self.accumulate_grad_batches == 1:
            return chosen
        sizes = {"global_batch_size": self.global_batch_size, "micro_batch_size": self.micro_batch_size}
        given = {name: size for name, size in sizes.items() if size is not None}
        name, options = (batching.name, batching.options) if batching is not None else (MICRO_BATCHING, {})
        complete = TechniqueChoice(name, {**given, **options})
        return (*(choice for choice in chosen if choice is not batching), complete)

    def _with_devices(self, strategy: TechniqueChoice) -> TechniqueChoice:
        nodes = int(strategy.options.get("num_nodes", 1))
        return TechniqueChoice(strategy.name, {**strategy.options, "devices": self.world_size // nodes})

    def _trainer_options(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for choice in self.chosen:
            completed = self._with_devices(choice) if choice.technique.kind == "strategy" else choice
            merged |= choice.technique.configured(**completed.options)[0]
        if self.world_size > 1:
            merged.setdefault("devices", self.world_size)
        if self.accumulate_grad_batches > 1:
            merged["accumulate_grad_batches"] = 1  # the loader gives the whole batch, which micro-batching cuts
        return merged


def _is_made_by(spec: CallbackSpec, callback: Any) -> bool:
    """Whether a callback is of a record's class, with the arguments that the record gives it."""
    if type(callback).__name__ != spec.name or type(callback) is not spec.load():
        return False
    arguments = arguments_of(callback)
    return all(arguments.get(name) == value for name, value in spec.init_args.items())


def _says(technique: Technique) -> int:
    return sum(len(spec.init_args) for spec in technique.callbacks)
