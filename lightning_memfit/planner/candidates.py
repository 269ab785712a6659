"""Every combination of techniques that may be chosen: what is allowed, installed and free of conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from lightning_memfit.planner.plan import label
from lightning_memfit.planner.workload import Workload
from lightning_memfit.techniques.core.registry import all_strategies, techniques
from lightning_memfit.techniques.core.setting import Setting, TechniqueChoice
from lightning_memfit.techniques.core.sharding import Sharding
from lightning_memfit.techniques.core.technique import Kind, Numerics, Technique
from lightning_memfit.techniques.micro_batching import TECHNIQUE as MICRO_BATCHING

SEARCHED: tuple[Kind, ...] = ("adapter", "optimizer", "precision", "gradient", "loss", "mlp", "matmul")
"""Kinds of technique that the search combines. The solver chooses checkpointing and micro-batch."""


@dataclass(frozen=True)
class Rejected:
    """A setting that was not chosen, and why."""

    setting: Setting
    reason: str
    needed_bytes: int | None = None
    """Bytes that the setting needs on a device, if that is why it was rejected."""
    resource_limited: bool = False
    """Whether a limit of the machine is the reason: host memory, disk, or what may be written to it."""
    seconds: float | None = None
    """Seconds that a step takes at least, if that is why it was rejected."""


def by_need(rejected: Iterable[Rejected]) -> list[Rejected]:
    """Those that need too much of a device, the one that needs least first."""
    too_large = [one for one in rejected if one.needed_bytes is not None]
    return sorted(too_large, key=lambda one: (one.needed_bytes, label(one.setting)))


def candidates(workload: Workload) -> tuple[list[Setting], list[Rejected]]:
    """Settings without micro-batch and checkpointing, in a fixed order, and the settings that rules refuse.

    Combinations that need something not allowed are left out silently; `missing_permissions` names them if nothing
    fits.
    """
    kept, refused, without = [], [], []
    for base in arrangements(workload):
        choices, dropped = _choices(workload, base)
        without += dropped
        for setting in _combinations(base, choices):
            reason = conflict(setting, workload)
            if reason is None:
                kept.append(setting)
            else:
                refused.append(Rejected(setting, reason))
    return kept, [*refused, *without]


def arrangements(workload: Workload) -> list[Setting]:
    """One device that holds everything, and every strategy on all devices; on a single device only those that offload.

    A run that has a strategy already keeps it, and a recipe its adapters.

    Using only some of the devices is not tried: what fits on fewer of them fits on all, and is faster there.
    """
    plain = Setting(chosen=() if workload.adapter is None else (workload.adapter,))
    found = [plain]
    total, nodes = workload.devices.total, workload.devices.machines
    if workload.division is not None:
        own = Sharding.of(workload.division)
        several = replace(plain, world_size=total)
        return [several.choose(one.name) for one in all_strategies() if one.sharding == own][:1]
    if not workload.strategies:
        return found
    for technique in all_strategies():
        if technique.sharding is not None and (total > 1 or technique.sharding.offloads):
            options = {"num_nodes": nodes} if nodes > 1 else {}
            found.append(replace(plain, world_size=total).choose(technique.name, **options))
    return found


def with_losses(setting: Setting) -> list[tuple[str, Setting]]:
    """Pairs of name and setting: the plain loss replaced by each technique for the loss, one at a time."""
    if setting.of_kind("loss") is not None:
        return []
    return [(technique.name, setting.choose(technique.name)) for technique in techniques() if technique.kind == "loss"]


def conflict(setting: Setting, workload: Workload) -> str | None:
    """Why techniques don't go together, with the module or with a setting's sizes, if it has some; None if they do."""
    run = setting.without_sizes().run(workload.facts)
    if setting.micro_batch_size is not None:
        other_size = workload.conflict_of_size(setting)
        if other_size is not None:
            return other_size
        run = replace(run, accumulate_grad_batches=setting.accumulate_grad_batches)
        # Where the loader cuts batches to size, the rules of the micro-batch loop don't apply.
        reason = MICRO_BATCHING.unsupported(run, {}) if workload.is_cut(setting) else None
        if reason is not None:
            return f"{MICRO_BATCHING.name}: {reason}"
    for choice in setting.chosen:
        reason = choice.technique.refusal(run, choice.options)
        if reason is not None:
            return f"{choice.name}: {reason}"
    return None


def missing_permissions(workload: Workload) -> list[tuple[Technique, tuple[Numerics, ...]]]:
    """Techniques that would save memory if more were allowed, with what they would need."""
    found: list[tuple[Technique, tuple[Numerics, ...]]] = []
    for technique in techniques():
        needed = tuple(sorted(technique.numerics - workload.allow - {"exact"}))
        if technique.kind in _searched(workload) and needed and technique.proposed:
            found.append((technique, needed))
    return found


def _searched(workload: Workload) -> tuple[Kind, ...]:
    """Kinds of techniques that a plan chooses from."""
    return tuple(kind for kind in SEARCHED if kind != "adapter" or workload.adapter is None)


def _choices(workload: Workload, base: Setting) -> tuple[list[list[TechniqueChoice | None]], list[Rejected]]:
    """What may be chosen of every kind besides a strategy, and what that strategy itself refuses.

    Few techniques go with a strategy. They are looked up one by one, so that their combinations stay few.
    """
    reason = conflict(base, workload)
    if reason is not None:
        return [[]], [Rejected(base, reason)]
    # DeepSpeed computes in half precision what Lightning's mixed precision leaves in fp32: another thing of that name.
    is_deepspeed = base.sharding is not None and base.sharding.deepspeed and workload.division is None
    own = None if is_deepspeed and workload.options.precision.endswith("-mixed") else workload.options.precision
    choices: list[list[TechniqueChoice | None]] = []
    dropped: list[Rejected] = []
    on_gpu = workload.target.device_kind.has_own_memory
    for kind in _searched(workload):
        options: list[TechniqueChoice] = []
        is_optional = True
        for technique in sorted(techniques(), key=lambda record: record.name):
            if technique.kind != kind:
                continue
            is_own = kind == "precision" and technique.trainer["precision"] == own and not technique.changes_step
            permitted = technique.numerics <= workload.allow and technique.proposed
            if permitted or is_own:
                found = _beside(base, technique, workload)
                if isinstance(found, Rejected):
                    dropped.append(found)
                else:
                    options.append(found)
                    # On a GPU that knows a recipe's half precision, float32 is no faster, and none of its numbers.
                    if is_own and on_gpu and conflict(base.choose(found.name, **found.options), workload) is None:
                        is_optional = False
        if not is_optional and own is not None and own.endswith("-true"):
            # Mixed precision takes more memory and time than that, and changes the recipe's numbers.
            options = [option for option in options if not option.technique.trainer["precision"].endswith("-mixed")]
        choices.append([None, *options] if is_optional else [*options])
    return choices, dropped


def _beside(base: Setting, technique: Technique, workload: Workload) -> TechniqueChoice | Rejected:
    """A technique with the first of its presets that goes with a strategy, or why none does."""
    if base.of_kind("strategy") is None:
        return TechniqueChoice(technique.name, technique.presets[0])
    reason: str | None = None
    for preset in technique.presets:
        together = base.choose(technique.name, **preset)
        reason = conflict(together, workload)
        if reason is None:
            return TechniqueChoice(technique.name, preset)
    return Rejected(together, reason or "it has no options to try")


def _combinations(base: Setting, choices: Sequence[Sequence[TechniqueChoice | None]]) -> Iterator[Setting]:
    for combination in product(*choices):
        setting = replace(base, chosen=(*base.chosen, *(choice for choice in combination if choice is not None)))
        if setting.of_kind("matmul") is None or setting.precision == "32-true":  # else no product is in fp32
            yield setting
