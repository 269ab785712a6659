"""`ReplaceOptimizer`: another kind of optimizer in the place of the module's own."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_memfit.estimate.optimizers import OptimizerFamily, optimizer_family
from lightning_memfit.optim.exchange import exchange
from lightning_memfit.optim.families import FAMILIES, family_named
from lightning_memfit.optim.replace import replace_optimizers
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import (
    CPU_SECONDS,
    FOREACH_PASSES,
    FUSED_PASSES,
    Cost,
    Work,
    num_trained,
    other_states,
)
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import CallbackSpec, Numerics, Options, Technique
from lightning_memfit.techniques.core.wrapping import wrap_method


class ReplaceOptimizer(TechniqueCallback):
    """Exchange what `configure_optimizers` returns for an optimizer of another family, groups and schedulers kept.

    Adafactor keeps slightly over 4 bytes per parameter less than Adam, Lion keeps half as many states, torchao's have 8
    or 4 bits. Learning rates and schedules stay as the module set them. Other hyper-parameters carry over where they
    mean the same, else they must be given or dropped; nothing is guessed (`optim.exchange`).

    For 8-bit or paged states of Lion, AdEMAMix, RMSprop, SGD and AdamW put `Optimizer8bit` after this callback.

    Args:
        name: Family and class, for example `torch.Adafactor`, `bitsandbytes.Lion`, `torchao.AdamW4bit`.
        options: Hyper-parameters of the new optimizer, for every group, and its `fused` or `foreach`.
        drop: Hyper-parameters of the module's optimizer to give up where the new one has no counterpart.

    Raises:
        ModuleNotFoundError: If the family's package is not installed.
        ValueError: If there is no such family, or an option sets the learning rate.
    """

    def __init__(self, name: str, options: dict[str, Any] | None = None, drop: list[str] | None = None) -> None:
        super().__init__()
        family = family_named(name)
        if find_spec(family.package) is None:
            raise ModuleNotFoundError(
                f"ReplaceOptimizer({name!r}) needs {family.package}: pip install {family.package}"
            )
        if "lr" in (options or {}):
            raise ValueError("`options.lr` would override the module's groups and schedules. Set the rate there.")
        self.name = name
        self.options = dict(options or {})
        self.drop = list(drop or [])

    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap `configure_optimizers`."""

        def configure(inner: Callable[[], Any]) -> Any:
            return replace_optimizers(inner(), self._convert)

        self.on_restore(wrap_method(pl_module, "configure_optimizers", configure))

    def _convert(self, optimizer: Optimizer) -> Optimizer:
        converted = exchange(optimizer, self.name, self.options, self.drop)
        note = family_named(self.name).note
        self.announce(f"{type(optimizer).__name__} -> {self.name}" + (f"; {note}" if note else ""))
        return converted


# --- records ----------------------------------------------------------------------------------------------------------

_CLASS_PATH = "lightning_memfit.techniques.optimizer.ReplaceOptimizer"
_EIGHT_BIT = CallbackSpec("lightning_memfit.techniques.optimizer_8bit.Optimizer8bit")


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None where the module's optimizer can be exchanged."""
    known = {name.partition(".")[2] for name in FAMILIES}
    other = next((name for name in run.facts.optimizers if name not in known), None)
    if other is not None:
        return f"what {other}'s hyper-parameters mean isn't known; only {', '.join(sorted(known))} can be exchanged."
    if run.strategy.startswith("DeepSpeed"):
        return f"{run.strategy} chooses the optimizer's kernel itself. Set the optimizer in the module."
    return None


def _record(
    name: str,
    summary: str,
    numerics: set[Numerics],
    init_args: Options,
    states: OptimizerFamily,
    cpu: str,
    package: str = "",
    then: tuple[CallbackSpec, ...] = (),
) -> Technique:
    def cost(profile: ModelProfile, options: Options) -> Cost:
        return Cost(step=other_states(profile, states, cpu))

    return Technique(
        name=name,
        kind="optimizer",
        summary=summary,
        numerics=frozenset(numerics),
        callbacks=(CallbackSpec(_CLASS_PATH, init_args), *then),
        unsupported=unsupported,
        cost=cost,
        package=package,
        page="optimizer",
        states=states,
    )


def _unsupported_fused(run: Run, options: Options) -> str | None:
    if run.facts.gradient_clip_val and run.precision.endswith("-mixed"):
        return (
            "fused optimizers unscale gradients themselves, so that Lightning refuses to clip them in "
            f"{run.precision!r}. Leave gradient_clip_val out, or use 32-true or bf16-true."
        )
    return unsupported(run, options)


def _cost_of_fusing(profile: ModelProfile, options: Options) -> Cost:
    count = num_trained(profile)
    if profile.device == "cpu":
        return Cost(step=Work(host_seconds=(CPU_SECONDS["adamw_fused"] - CPU_SECONDS["adamw"]) * count))
    return Cost(step=Work(device_bytes=-4.0 * (FOREACH_PASSES - FUSED_PASSES) * count))


FUSED_ADAMW = Technique(
    name="fused_adamw",
    kind="optimizer",
    summary="AdamW in one kernel, without the scratch memory of the batched one",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec(_CLASS_PATH, {"name": "torch.AdamW", "options": {"fused": True}}),),
    unsupported=_unsupported_fused,
    cost=_cost_of_fusing,
    page="optimizer",
    states=optimizer_family("adamw_fused"),
)
ADAFACTOR = _record(
    "adafactor",
    "a row and a column of statistics per weight matrix instead of two states per weight",
    {"optimizer"},
    {"name": "torch.Adafactor", "options": {"eps": [None, 1.0e-3]}, "drop": ["betas"]},
    optimizer_family("adafactor"),
    "adafactor",
)
LION = _record(
    "lion",
    "one state per weight instead of two; wants a learning rate three to ten times smaller",
    {"optimizer"},
    {"name": "bitsandbytes.Lion", "options": {"betas": [0.9, 0.99]}, "drop": ["eps"]},
    optimizer_family("lion"),
    "lion",
    "bitsandbytes",
)
LION_8BIT = _record(
    "lion_8bit",
    "Lion with 8-bit states: one byte per weight",
    {"optimizer", "8bit"},
    {"name": "bitsandbytes.Lion", "options": {"betas": [0.9, 0.99]}, "drop": ["eps"]},
    optimizer_family("lion_8bit"),
    "lion_8bit",
    "bitsandbytes",
    (_EIGHT_BIT,),
)
TORCHAO_8BIT = _record(
    "torchao_adamw_8bit",
    "AdamW with 8-bit states in torchao's compiled form",
    {"8bit"},
    {"name": "torchao.AdamW8bit"},
    optimizer_family("adamw_8bit"),
    "torchao_8bit",
    "torchao",
)
TORCHAO_4BIT = _record(
    "torchao_adamw_4bit",
    "AdamW with 4-bit states: one byte per weight",
    {"4bit"},
    {"name": "torchao.AdamW4bit"},
    optimizer_family("adamw_4bit"),
    "torchao_4bit",
    "torchao",
)
TORCHAO_FP8 = _record(
    "torchao_adamw_fp8",
    "AdamW with float8 states; quick on the CPU",
    {"8bit"},
    {"name": "torchao.AdamWFp8"},
    optimizer_family("adamw_8bit"),
    "torchao_fp8",
    "torchao",
)
