"""`Technique`: one way to trade memory for time or precision, as a record that can be listed, applied and refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_memfit.extras import how_to_install, is_installed
from lightning_memfit.techniques.core.facts import Options as Options
from lightning_memfit.techniques.core.facts import Run, defaults_of

if TYPE_CHECKING:
    from lightning_memfit.optim.optimizers import StateLayout
    from lightning_memfit.profile.record import ModelProfile
    from lightning_memfit.techniques.core.cost import Cost
    from lightning_memfit.techniques.core.sharding import Sharding

Kind = Literal[
    "adapter",
    "optimizer",
    "precision",
    "gradient",
    "zero_grad",
    "loss",
    "attention",
    "mlp",
    "checkpointing",
    "compile",
    "matmul",
    "loader",
    "batching",
    "strategy",
]
"""What a technique decides. A run has at most one of each kind; callbacks are listed in this order."""

KINDS: tuple[Kind, ...] = get_args(Kind)

Numerics = Literal["exact", "tf32", "bf16", "fp16", "stochastic", "8bit", "4bit", "optimizer", "lora"]
"""How results may differ from the plain run in fp32: `exact` up to the order of additions, products in `tf32`, weights
or activations in half precision, random rounding, quantized states or weights, another optimizer, adapters."""

TOLERANCES: Mapping[Numerics, float] = {
    "exact": 1e-6,
    "tf32": 1e-2,
    "bf16": 2e-2,
    "fp16": 1e-2,
    "stochastic": 2e-2,
    "8bit": 1e-2,
    "4bit": 5e-2,
    "optimizer": 1e-6,
    "lora": 1e-6,
}
"""How far losses of the first steps may be from those of fp32, relative to them: for `optimizer` and `lora` those of a
run with that optimizer, or with such adapters; else those of the plain run. Several add up."""

WORDS: Mapping[Numerics, str] = {
    "tf32": "matrix products in TF32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "stochastic": "random rounding",
    "8bit": "8-bit {}",
    "4bit": "4-bit {}",
    "optimizer": "another optimizer",
    "lora": "only adapters are trained",
}
"""What each class changes, in a few words; `{}` is what a technique keeps in so many bits."""


@dataclass(frozen=True)
class CallbackSpec:
    """A callback, or a plugin of precision, as YAML names it."""

    class_path: str
    init_args: Mapping[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    """Arguments that stay at their defaults, whatever options of these names the technique is given."""

    @property
    def name(self) -> str:
        """Class name."""
        return self.class_path.rpartition(".")[2]

    def load(self) -> type:
        """Import the class."""
        module, _, name = self.class_path.rpartition(".")
        found: type = getattr(import_module(module), name)
        return found

    @property
    def is_precision(self) -> bool:
        """Whether it is a plugin of precision instead, which YAML has under `trainer.plugins`."""
        return hasattr(self.load(), "convert_module")

    @property
    def arguments(self) -> Options:
        """All arguments of the class, defaults included."""
        return {**defaults_of(self.load()), **self.init_args}

    def to_dict(self) -> dict[str, Any]:
        """`class_path` and, where there are any, `init_args`."""
        arguments = {"init_args": dict(self.init_args)} if self.init_args else {}
        return {"class_path": self.class_path, **arguments}


def supported(run: Run, options: Options) -> str | None:
    """The rule of a technique that has no conflicts."""
    return None


def free(profile: ModelProfile, options: Options) -> Cost:
    """The cost of a technique that takes no time."""
    from lightning_memfit.techniques.core.cost import Cost  # which plans alone need, and this file is in every run

    return Cost()


@dataclass(frozen=True)
class Technique:
    """One entry of the registry. Its memory comes from tracing what `build` returns, never from a second formula."""

    name: str
    """Name of the technique, as `--with` takes it."""
    kind: Kind
    summary: str
    """One line for tables."""
    numerics: frozenset[Numerics]
    """What must be allowed for it; only `exact` promises the plain run's numbers."""
    callbacks: tuple[CallbackSpec, ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Trainer options that the technique sets."""
    presets: tuple[Options, ...] = ({},)
    """Options worth trying in a search, each if those before it are refused."""
    unsupported: Callable[[Run, Options], str | None] = supported
    """Reason and fix, or None if it fits the rest of a run that includes it with these options. Pure function."""
    cost: Callable[[ModelProfile, Options], Cost] = free
    """Work added to a step, from a profile of the plain step and this technique's options. Pure function."""
    package: str = ""
    """Module that must be importable."""
    traced: bool = True
    """Whether its callbacks change what a traced step allocates."""
    proposed: bool = True
    """Whether a plan may choose it by itself. False if it loses accuracy unnoticed: only a recipe may choose that."""
    frees_gradients: bool = False
    """Whether each gradient is freed as soon as it is complete, so that they never exist all at once on the device."""
    masters_on_host: bool = False
    """Whether fp32 weights, gradients and optimizer states are in host memory, and only half-precision weights on the
    device."""
    states: StateLayout | None = None
    """For kind `optimizer`: size of the states of a module that uses AdamW, and whether they are paged."""
    changes_step: bool = True
    """Whether an optimizer step allocates differently from the module's own, so that it is traced again. False for
    techniques that only affect forward and backward."""
    yields_to: str = ""
    """Name of a technique that a plan takes instead wherever it fits: what this one costs is not known well enough to
    prefer it for a few percent."""
    same_step_as: str = ""
    """Name of a technique whose steps allocate the same, so that one trace serves both."""
    page: str = ""
    """Page in docs/techniques, without the ending; by default the name."""
    sharding: Sharding | None = None
    """For a strategy: what it divides and where it keeps it, from which its memory and traffic follow."""
    lightning_strategy: str = ""
    """For a strategy: Lightning's class that it derives from, by which rules know it (`Run.strategy`)."""

    def missing(self) -> str | None:
        """Why it can't be used in this environment, and what to install; None if it can."""
        if not self.package or is_installed(self.package):
            return None
        return f"needs {self.package}: {how_to_install(self.package)}"

    def refusal(self, run: Run, options: Options) -> str | None:
        """Why a run that includes it can't have it with these options, and the fix; None if it can.

        This is what settings and plans ask. Each callback asks the same of itself when its run is set up.
        """
        reason = self.missing() or self.unsupported(run, options)
        for spec in self.configured(**options)[1] if reason is None else ():
            rule = getattr(spec.load(), "refusal", None)
            reason = reason or (rule(run, spec.arguments) if rule is not None else None)
        return reason

    def configured(self, **options: Any) -> tuple[dict[str, Any], tuple[CallbackSpec, ...]]:
        """Trainer options and callbacks. Every option goes to the trainer options and callbacks that have that name.

        Raises:
            ValueError: If none has it.
        """
        trainer = {name: options.get(name, value) for name, value in self.trainer.items()}
        specs, known = [], list(self.trainer)
        for spec in self.callbacks:
            names = [name for name in defaults_of(spec.load()) if name not in spec.kept]
            taken = {name: options[name] for name in names if name in options}
            known += names
            specs.append(CallbackSpec(spec.class_path, {**spec.init_args, **taken}))
        left = {name: value for name, value in options.items() if name not in known}
        if left:
            name = next(iter(left))
            closest = get_close_matches(name, known, n=3, cutoff=0.5) or known
            raise ValueError(
                f"`{name}={left[name]!r}` is no option of {self.name}. Closest: {', '.join(closest) or 'none'}."
            )
        return trainer, tuple(specs)

    def config(self, **options: Any) -> dict[str, Any]:
        """Configuration that uses the technique in YAML: `trainer` with its options, `callbacks+` and `plugins+`."""
        return overlay(*self.configured(**options))

    def build(self, **options: Any) -> list[Any]:
        """Callbacks and plugins for a Trainer, or for `profile_module(..., callbacks=...)`."""
        reason = self.missing()
        if reason is not None:
            raise ModuleNotFoundError(f"{self.name} {reason}")
        _, specs = self.configured(**options)
        return [spec.load()(**spec.init_args) for spec in specs]


def overlay(trainer: Mapping[str, Any], specs: Sequence[CallbackSpec]) -> dict[str, Any]:
    """Trainer options, and callbacks and plugins to append, as `fit --config` reads them."""
    options: dict[str, Any] = dict(trainer)
    appended: dict[str, list[Any]] = {}
    for spec in specs:
        if spec.is_precision:
            options["precision"] = None  # a Trainer takes a name or a plugin
        appended.setdefault("plugins+" if spec.is_precision else "callbacks+", []).append(spec.to_dict())
    options |= appended
    return {"trainer": options} if options else {}
