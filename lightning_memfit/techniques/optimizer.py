"""`ReplaceOptimizer`: another kind of optimizer in place of the module's own.

Its techniques, one per optimizer, are derived from the records of `optim.optimizers`.
"""

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.extras import require
from lightning_memfit.optim.exchange import exchange, untranslatable
from lightning_memfit.optim.optimizers import OPTIMIZERS, OptimizerRecord, class_named, optimizer_classes
from lightning_memfit.optim.replace import convert_configured
from lightning_memfit.optim.states import Resume
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import Cost
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.step_cost import fusing, other_states
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile


class ReplaceOptimizer(TechniqueCallback):
    """Replace what `configure_optimizers` returns by an optimizer of another class; groups and schedulers are kept.

    Adafactor keeps slightly over 4 bytes per parameter less than Adam, Lion keeps half as many states, and torchao's
    states have 4 bits. Learning rates and schedules stay as the module set them. Other hyper-parameters carry over
    if they mean the same, otherwise they must be given or dropped; nothing is guessed (`optim.exchange`).

    The module's optimizer becomes the new one: a reference to it, its groups and its hooks stay valid. 8-bit states of
    the same family go on, so that `torch.AdamW` leads back from them; those of another family are refused.

    For 8-bit or paged states of Lion, SGD and AdamW put `Optimizer8bit` after this callback.

    Args:
        name: Package and class, for example `torch.Adafactor`, `bitsandbytes.Lion`, `torchao.AdamW4bit`.
        options: Hyper-parameters of the new optimizer, for every group, and its `fused` or `foreach`.
        drop: Hyper-parameters of the module's optimizer to give up if the new one has no counterpart.

    Raises:
        ModuleNotFoundError: If the package of the class is not installed.
        ValueError: If there is no such class, or an option sets the learning rate.
    """

    def __init__(self, name: str, options: dict[str, Any] | None = None, drop: list[str] | None = None) -> None:
        super().__init__()
        cls = class_named(name)
        require(cls.package, f"ReplaceOptimizer({name!r})")
        if "lr" in (options or {}):
            raise ValueError("`options.lr` would override the module's groups and schedules. Set the rate there.")
        self.name = name
        self.options = dict(options or {})
        self.drop = list(drop or [])

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap `configure_optimizers`."""
        self.on_restore(convert_configured(pl_module, self._convert))

    @property
    def _technique(self) -> str:
        given = "".join(f", {key}={getattr(self, key)!r}" for key in ("options", "drop") if getattr(self, key))
        return f"ReplaceOptimizer({self.name!r}{given})"

    def _convert(self, optimizer: Optimizer) -> Optimizer:
        if Resume.was_made_by(optimizer, self._technique):
            return optimizer
        converted = exchange(optimizer, self.name, self.options, self.drop, self._technique)
        note = class_named(self.name).note
        self.announce(f"{type(optimizer).__name__} -> {self.name}" + (f"; {note}" if note else ""))
        return converted


# --- techniques -------------------------------------------------------------------------------------------------------

_CLASS_PATH = "lightning_memfit.techniques.optimizer.ReplaceOptimizer"
_EIGHT_BIT = CallbackSpec("lightning_memfit.techniques.optimizer_8bit.Optimizer8bit")


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if the module's optimizer can be exchanged."""
    if dict(options.get("options") or {}).get("fused") and run.facts.gradient_clip_val and "-mixed" in run.precision:
        return (
            "fused optimizers unscale gradients themselves, so that Lightning refuses to clip them in "
            f"{run.precision!r}. Leave gradient_clip_val out, or use 32-true or bf16-true."
        )
    known = {cls.class_name for cls in optimizer_classes().values()}
    other = next((name for name in run.facts.optimizers if name not in known), None)
    if other is not None:
        return f"what {other}'s hyper-parameters mean isn't known; only {', '.join(sorted(known))} can be exchanged."
    for source, group in run.facts.groups:
        if source not in optimizer_classes():  # hyper-parameters of unknown meaning
            continue
        given, drop = options.get("options") or {}, options.get("drop") or ()
        reason = untranslatable(source, group, str(options["name"]), given, drop)
        if reason is not None:
            return reason
    if run.strategy.startswith("DeepSpeed"):
        return f"{run.strategy} chooses the optimizer's kernel itself. Set the optimizer in the module."
    return None


def technique_of(record: OptimizerRecord) -> Technique:
    """The technique that exchanges a module's optimizer for the one in a record.

    Raises:
        ValueError: If the record has no `replacement`.
    """
    replacement = record.replacement
    if replacement is None:
        raise ValueError(f"`record` ({record.name}) has no `replacement`, which says what its technique is called.")
    fused = bool(record.arguments.get("fused"))

    def cost(profile: "ModelProfile", options: Options) -> Cost:
        return Cost(step=fusing(profile, record.name) if fused else other_states(profile, record.name))

    given = {"options": dict(replacement.options), "drop": list(replacement.drop)}
    arguments = {"name": record.cls.name, **{name: value for name, value in given.items() if value}}
    spec = CallbackSpec(_CLASS_PATH, arguments)

    def rule(run: Run, options: Options) -> str | None:
        reason = unsupported(run, {**arguments, **options})
        if reason is not None or "optimizer" in replacement.numerics:
            return reason
        families = {cls.class_name: cls.family for cls in optimizer_classes().values()}
        other = next((name for name in run.facts.optimizers if families.get(name) != record.cls.family), None)
        return other and (
            f"{other} would become {record.cls.name}, which steps otherwise. Leave it out, or exchange the optimizer "
            "on purpose with ReplaceOptimizer."
        )

    return Technique(
        name=replacement.technique,
        kind="optimizer",
        summary=replacement.summary,
        numerics=replacement.numerics,
        callbacks=(spec, _EIGHT_BIT) if replacement.then_8bit else (spec,),
        unsupported=rule,
        cost=cost,
        package="" if record.package == "torch" else record.package,
        page="optimizer",
        states=record.states,
    )


TECHNIQUES = tuple(technique_of(record) for record in OPTIMIZERS.values() if record.replacement is not None)
