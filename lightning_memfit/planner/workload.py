"""`Workload`: what to train, on what, and within which limits; everything that a plan depends on.

`Budget` compares what a plan needs with these limits, and says in words why it is too much. The parsers at the end read
what a user names: allowed numerics, the module, the number of devices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.estimate.division import Division
from lightning_memfit.estimate.target import Target
from lightning_memfit.memory import MemoryBreakdown, Tier, format_bytes
from lightning_memfit.planner.rates import Rates
from lightning_memfit.profile.build import batch_size
from lightning_memfit.profile.fake import tensors_in
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import of_built
from lightning_memfit.techniques.core.facts import Facts
from lightning_memfit.techniques.core.model_facts import read_facts
from lightning_memfit.techniques.core.setting import Setting, TechniqueChoice
from lightning_memfit.techniques.core.sharding import Sharding
from lightning_memfit.techniques.core.technique import Numerics

NUMERICS: tuple[Numerics, ...] = get_args(Numerics)

DEFAULT_ALLOW: frozenset[Numerics] = frozenset({"exact", "tf32", "bf16", "stochastic", "8bit"})
"""What a plan may change by default: neither what is trained nor the optimizer's formula."""

Preference = Literal["numbers", "speed"]
"""What a plan is to keep: the recipe's numbers wherever anything that keeps them fits, or speed beyond `TOLERANCE`."""

TOLERANCE = 0.05
"""Share of its time that a plan for speed may take longer to keep the recipe's own numbers."""

KEEP_NUMBERS = 1e6
"""The same for a plan that keeps them at any price."""

_RESERVE = 0.03
"""Share of a device left free beyond its safety margin, because a plan put together from several traces has errors."""

_RESERVE_OF_TENSORS = 0.005
"""The same if only live tensors count: plans were 0.2 % below their runs at most (`benchmarks/planner/pairs`)."""

_DAY = 86400
"""Seconds in a day."""


@dataclass(frozen=True)
class Limits:
    """What a run may use of each machine apart from its devices. None means unlimited."""

    host_bytes: int | None = None
    """Pageable and pinned memory together."""
    disk_bytes: int | None = None
    disk_writes_per_day: int | None = None
    """Bytes that training without a pause may write."""
    pinned_bytes: int | None = None
    """The part of host memory that may be page-locked."""


@dataclass(frozen=True)
class Devices:
    """How many devices there are."""

    per_machine: int = 1
    machines: int = 1

    @property
    def total(self) -> int:
        """Number of devices of all machines together."""
        return self.per_machine * self.machines


@dataclass(frozen=True)
class Workload:
    """A module, a real batch, and the machine.

    Raises:
        ValueError: If the batch per step can't be shared equally among the devices.
    """

    module: Any
    """LightningModule; never changed."""
    batch: Any
    """One real batch of the loader."""
    options: StepOptions
    """The recipe's precision, accumulation and clipping."""
    samples_per_step: int
    """Samples per optimizer step, over all devices."""
    target: Target
    rates: Rates
    facts: Facts
    limits: Limits = field(default_factory=Limits)
    allow: frozenset[Numerics] = DEFAULT_ALLOW
    fixed: tuple[Any, ...] = ()
    """Callbacks of the user that change a step and that no record describes; part of every trace."""
    adapter: TechniqueChoice | None = None
    """The adapters that the recipe itself trains, which every plan keeps; None if it has none, or if a plan may choose
    them."""
    loader_batch: int | None = None
    """Batch size of a loader that can't be changed, so that `MicroBatching` cuts its batches; None if it can be set."""
    own_micro_batch: int | None = None
    """Samples of a micro-batch of the run as it is; None if that is not known."""
    batching: Mapping[str, Any] | None = None
    """Arguments of the recipe's own `MicroBatching`, which makes the micro-batches then; None if it has none."""
    devices: Devices = field(default_factory=Devices)
    strategies: bool = False
    """Whether strategies are searched as well; if not, a plan is for one device alone."""
    division: Division | None = None
    """How the strategy that the run already has divides it; no other is searched then."""
    tolerance: float = TOLERANCE
    """Share of its time that a plan may take longer to keep the recipe's own numbers; `KEEP_NUMBERS` for any."""
    own: Setting | None = None
    """The recipe's own techniques and sizes, to compare plans with; None if they are not known."""

    def __post_init__(self) -> None:
        samples = self.samples_per_step
        if samples % self.devices.total:
            raise ValueError(
                f"{samples} samples per optimizer step can't be shared equally among {self.devices.total} devices. "
                f"Use a number of devices that divides {samples}, or change the batch."
            )

    def must_allow(self, setting: Setting) -> frozenset[Numerics]:
        """What has to be allowed for a setting: everything but the adapters that the recipe itself trains."""
        return (setting if self.adapter is None else setting.without("adapter")).numerics

    def samples_on_each(self, world_size: int = 1) -> int:
        """Samples per optimizer step of each of `world_size` devices."""
        return self.samples_per_step // world_size

    def sizes(self, world_size: int = 1) -> tuple[int, ...]:
        """Micro-batch sizes that divide the samples of a device's step, or a batch of the loader, evenly."""
        whole = self.loader_batch or self.samples_on_each(world_size)
        return tuple(size for size in range(1, whole + 1) if whole % size == 0)

    def is_cut(self, setting: Setting) -> bool:
        """Whether `MicroBatching` makes a setting's micro-batches, rather than the loader or an engine of DeepSpeed.

        That of a recipe takes means over a whole step, of all devices. A step of one micro-batch needs none.

        Args:
            setting: A setting with its sizes.
        """
        size = setting.micro_batch_size
        if self.loader_batch is not None and size != self.loader_batch:
            return True
        if self.batching is None or (setting.sharding is not None and setting.sharding.deepspeed):
            return False
        is_lent = self.loader_batch is not None and self.batching.get("global_batch_size") is not None
        return is_lent or setting.global_batch_size != size

    def conflict_of_size(self, setting: Setting) -> str | None:
        """Why micro-batches of a setting's size would train otherwise than the run's own; None if that is not known."""
        return None if setting.micro_batch_size == self.own_micro_batch else self.kept_size

    @property
    def kept_size(self) -> str | None:
        """Why micro-batches must have the size of the run's own; None if they need not, as far as that is known."""
        layers, own = self.facts.batch_statistics, self.own_micro_batch
        accepted = self.batching is not None and self.batching.get("allow_batch_statistics")
        if not layers or accepted or own is None:
            return None
        names = ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else "")
        return (
            f"layers normalise with statistics of their micro-batch ({names}), which are those of {own} samples in the "
            "run as it is: with another size results change, which `MicroBatching(allow_batch_statistics=True)` accepts"
        )

    def loaded_samples(self, setting: Setting) -> int:
        """Samples that the loader of a device gives at once under a setting with its sizes."""
        size = setting.micro_batch_size or 1
        return self.loader_batch or (size * setting.accumulate_grad_batches if self.is_cut(setting) else size)

    def waiting_bytes(self, setting: Setting) -> int:
        """Bytes on the device of samples that wait for their micro-batch to run, under a setting with its sizes."""
        waiting = max(0, self.loaded_samples(setting) - (setting.micro_batch_size or 1))
        return sum(tensor.nbytes for tensor in tensors_in(self.batch)) * waiting // batch_size(self.batch)

    def knowing(self, profile: ModelProfile) -> Workload:
        """This workload, with facts that a trace of the module's own step has found: optimizers and length of samples.

        Without them no rule could tell that a technique would exchange, say, SGD for AdamW.
        """
        facts = replace(self.facts, sequence_length=profile.sequence_length or 0)
        if profile.optimizer and not facts.optimizers:
            names = tuple(profile.optimizer.split(" + "))
            facts = replace(facts, optimizers=names, groups=profile.optimizer_groups)
        return replace(self, facts=facts)

    def on(self, capacity_bytes: int) -> Workload:
        """This workload on a device of another size."""
        target = self.target
        margin = target.margin_bytes if target.counts_tensors else safety_margin_bytes(capacity_bytes)
        return replace(self, target=replace(target, capacity_bytes=capacity_bytes, margin_bytes=margin))

    def devices_per_machine(self, world_size: int) -> int:
        """Devices of each machine that take part in a run on `world_size` devices."""
        return self.devices.per_machine if world_size > 1 else 1

    def division_of(self, name: str, sharding: Sharding, world_size: int) -> Division:
        """How a strategy divides a run on `world_size` devices: the run's own as it is, another as a plan sets it up.

        Args:
            name: The strategy's name among techniques.
            sharding: What it divides and moves.
            world_size: Devices of the run.
        """
        if self.division is not None:
            return self.division
        return sharding.division(name, world_size, self.devices_per_machine(world_size), sharding.offloads)


class Budget:
    """What a plan may use of a device, and of the host memory and disk of a machine.

    Args:
        workload: Its target and limits say what is available.

    Attributes:
        withheld: Bytes by strategy that its plans may not use, as a trace of one needed them beyond its prediction.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.withheld = Counter[str]()

    @property
    def usable_bytes(self) -> int:
        """Bytes of the device that a plan may need.

        Raises:
            ValueError: If there is no device to plan for.
        """
        usable = self._workload.target.usable_bytes
        if usable is None:
            raise ValueError(
                "There is no GPU here and none was named. Pass for example `--device 'RTX 3060'` or 12GiB."
            )
        reserve = _RESERVE_OF_TENSORS if self._workload.target.counts_tensors else _RESERVE
        return int(usable * (1 - reserve))

    def usable_by(self, setting: Setting) -> int:
        """Bytes of the device that a plan with a setting's strategy may need by its prediction."""
        strategy = setting.of_kind("strategy")
        return self.usable_bytes - (self.withheld[strategy.name] if strategy is not None else 0)

    @property
    def overhead_bytes(self) -> int:
        """Bytes on the device outside the tensors that a trace shows."""
        runtime = self._workload.target.runtime
        return runtime.context_bytes + runtime.allocated_bytes if runtime is not None else 0

    def over(self, setting: Setting, needed_bytes: int, what: str = "needs") -> str:
        """Say by how much a plan is too large for the device: `needs 13.1 GiB, 1.9 over`."""
        excess = needed_bytes - self.usable_by(setting)
        return f"{what} {format_bytes(needed_bytes)}, {format_bytes(excess)} over"

    def refuse_off_device(self, off_device: MemoryBreakdown, world_size: int) -> str | None:
        """Why what a plan keeps off the devices is too much for a machine; None if it isn't.

        Args:
            off_device: Bytes per rank in host memory and on disk.
            world_size: Devices of the plan.
        """
        limits, each = self._workload.limits, self._workload.devices_per_machine(world_size)
        host = off_device.total(Tier.HOST) + off_device.total(Tier.PINNED_HOST)
        among = f" for {each} devices" if each > 1 else ""
        for what, needed, limit in (
            ("host memory", host, limits.host_bytes),
            ("page-locked host memory", off_device.total(Tier.PINNED_HOST), limits.pinned_bytes),
            ("disk", off_device.total(Tier.DISK), limits.disk_bytes),
        ):
            if limit is None or each * needed <= limit:
                continue
            needs = f"needs {format_bytes(each * needed)} of {what}{among}"
            if what == "disk" and not limit:
                return f"{needs}, and there is none that may be used (`--disk`)"
            return f"{needs}, {format_bytes(each * needed - limit)} over the {format_bytes(limit)} there are"
        return None

    def refuse_writes(self, written_bytes: int, seconds: float) -> str | None:
        """Why a plan writes too much to disk; None if it doesn't.

        Args:
            written_bytes: Bytes to the drive of a machine in every optimizer step.
            seconds: Seconds per optimizer step.
        """
        limit = self._workload.limits.disk_writes_per_day
        if limit is None or not written_bytes:
            return None
        per_day = round(written_bytes * _DAY / seconds)
        if per_day <= limit:
            return None
        return (
            f"writes {format_bytes(per_day)} per day to disk, {format_bytes(per_day - limit)} over the limit of "
            f"{format_bytes(limit)} (`--disk-writes-per-day`)"
        )


def check_allow(names: Iterable[str]) -> frozenset[Numerics]:
    """Check the classes of numerics that a user names, and add `exact`.

    Raises:
        ValueError: If one is unknown, or none is left.
    """
    wanted = [name.strip() for name in names if name.strip()]
    unknown = [name for name in wanted if name not in NUMERICS]
    if unknown:
        raise ValueError(f"`allow`: {', '.join(unknown)} is none of {', '.join(NUMERICS)}.")
    if not wanted:
        raise ValueError(f"`allow` is empty, so nothing may run. Name at least `exact`, of {', '.join(NUMERICS)}.")
    return frozenset(name for name in NUMERICS if name in wanted or name == "exact")


def spell_allow(allow: frozenset[Numerics]) -> str:
    """Classes of numerics as `--allow` takes them."""
    return ",".join(name for name in NUMERICS if name in allow)


def tolerance_of(prefer: Preference | None, allow: object = None, argument: str = "prefer") -> float:
    """How much longer a step may take if that keeps the recipe's numbers, as a share.

    Args:
        prefer: What the user wrote; None means speed where the user said what may change, else the numbers.
        allow: What the user said may change; None if nothing.
        argument: Name used in the error message.

    Raises:
        ValueError: If it is no preference.
    """
    if prefer is None:
        prefer = "numbers" if allow is None else "speed"
    if prefer not in get_args(Preference):
        raise ValueError(f"`{argument}={prefer}` is none of numbers, speed.")
    return KEEP_NUMBERS if prefer == "numbers" else TOLERANCE


def facts_of(module: Any, target: Target, options: StepOptions, optimizer: str = "") -> Facts:
    """Read the facts of a module, which is built without memory if it has `configure_model`.

    Raises:
        ValueError: If the module has no training step.
        TraceError: If it can't be built without memory.
    """
    check_trainable(module)
    capability = target.capability if target.device_kind.has_compute_capability else None
    clipping = (options.gradient_clip_val, options.gradient_clip_algorithm)
    read = partial(_facts_of, (target.kind, capability, optimizer, *clipping))
    return of_built(module, read)


def _facts_of(settings: tuple[Any, ...], module: Any) -> Facts:
    return read_facts(module, *settings)


def check_trainable(module: Any) -> None:
    """Refuse a module for which no plan can be made.

    Raises:
        ValueError: If it is not a LightningModule with a training step.
    """
    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.model_helpers import is_overridden

    if not isinstance(module, LightningModule):
        raise ValueError(f"`module` is a {type(module).__name__}. Give a LightningModule.")
    for hook in ("training_step", "configure_optimizers"):
        if not is_overridden(hook, module):
            raise ValueError(f"{type(module).__name__} has no `{hook}`, so there is no training to plan. Write one.")


_COUNT = re.compile(r"\s*(\d+)\s*x\s*(\S.*)", re.IGNORECASE)


def parse_device_count(name: str) -> tuple[int | None, str]:
    """Split `8x A100 80GB` into 8 and `A100 80GB`; the number is None if the name has none.

    Raises:
        ValueError: If the number is 0.
    """
    match = _COUNT.fullmatch(name)
    if match is None:
        return None, name
    count = int(match[1])
    if count < 1:
        raise ValueError(f"`--device {name}`: there must be at least one device.")
    return count, match[2].strip()
