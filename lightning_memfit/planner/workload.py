"""`Workload`: what shall be trained, on what, within which limits; everything a plan depends on."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from lightning_memfit.estimate.target import Target
from lightning_memfit.planner.time import Rates
from lightning_memfit.profile.build import batch_size
from lightning_memfit.profile.fake import fake_pretrained_weights, tensors_in
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.facts import Facts, read_facts
from lightning_memfit.techniques.core.technique import Numerics

NUMERICS: tuple[Numerics, ...] = get_args(Numerics)

DEFAULT_ALLOW: frozenset[Numerics] = frozenset({"exact", "tf32", "bf16", "stochastic", "8bit"})
"""What a plan may change unless told otherwise: not what is trained, nor the optimizer's formula."""


@dataclass(frozen=True)
class Limits:
    """What a run may use of each machine beside the devices. None is unlimited."""

    host_bytes: int | None = None
    """Pageable and pinned together."""
    disk_bytes: int | None = None
    disk_writes_per_day: int | None = None
    """Bytes that training without a pause may write."""
    pinned_bytes: int | None = None
    """Of host memory, what may be page-locked."""


@dataclass(frozen=True)
class Devices:
    """How many devices there are.

    Raises:
        ValueError: If there is none.
    """

    per_machine: int = 1
    machines: int = 1

    def __post_init__(self) -> None:
        for name in ("per_machine", "machines"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}={getattr(self, name)}`: a run needs at least one device.")

    @property
    def total(self) -> int:
        """Of all machines together."""
        return self.per_machine * self.machines


@dataclass(frozen=True)
class Workload:
    """A module, a real batch, and the machine.

    Raises:
        ValueError: If the batch per step is less than one sample, or can't be shared equally among the devices.
    """

    module: Any
    """LightningModule; never changed."""
    batch: Any
    """One real batch of the loader."""
    options: StepOptions
    """The recipe's precision, accumulation and clipping."""
    share: int
    """Samples per optimizer step, over all devices."""
    target: Target
    rates: Rates
    facts: Facts
    limits: Limits = field(default_factory=Limits)
    allow: frozenset[Numerics] = DEFAULT_ALLOW
    fixed: tuple[Any, ...] = ()
    """Callbacks of the user that change a step and that no record describes; part of every trace."""
    loader_batch: int | None = None
    """Samples in a batch of a loader that stays as it is, so that `MicroBatching` cuts it; None where it can be set."""
    devices: Devices = field(default_factory=Devices)
    strategies: bool = False
    """Whether strategies are searched, too; else a plan is for one device alone."""

    def __post_init__(self) -> None:
        if self.share < 1:
            raise ValueError(f"`share={self.share}`: a step needs at least one sample.")
        if self.share % self.devices.total:
            raise ValueError(
                f"{self.share} samples per optimizer step can't be shared equally among {self.devices.total} devices. "
                f"Use a number of devices that divides {self.share}, or change the batch."
            )

    def samples_on_each(self, world_size: int = 1) -> int:
        """Samples per optimizer step of each of so many devices."""
        return self.share // world_size

    def sizes(self, world_size: int = 1) -> tuple[int, ...]:
        """Micro-batch sizes that divide a device's step, or a batch of the loader, evenly, so that all are equal."""
        whole = self.loader_batch or self.samples_on_each(world_size)
        return tuple(size for size in range(1, whole + 1) if whole % size == 0)

    def waiting_bytes(self, size: int) -> int:
        """Bytes on the device of the samples that wait there for their micro-batch."""
        if self.loader_batch is None:
            return 0
        total = sum(tensor.nbytes for tensor in tensors_in(self.batch))
        return total * max(0, self.loader_batch - size) // batch_size(self.batch)


def check_allow(names: Iterable[str]) -> frozenset[Numerics]:
    """The classes of numerics that a user names.

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


def facts_of(module: Any, target: Target, options: StepOptions, optimizer: str = "") -> Facts:
    """Facts of a module, built without memory where it builds itself.

    Raises:
        ValueError: If the module has no training step.
    """
    check_trainable(module)
    shape = module
    if hasattr(module, "configure_model"):
        with torch.device("meta"), fake_pretrained_weights(), contextlib.suppress(NotImplementedError):
            shape = copy.deepcopy(module)
            shape.configure_model()
    capability = target.capability if target.device_kind.has_compute_capability else None
    return read_facts(
        shape, target.kind, capability, optimizer, options.gradient_clip_val, options.gradient_clip_algorithm
    )


def check_trainable(module: Any) -> None:
    """Refuse what can't be planned for.

    Raises:
        ValueError: If it is no LightningModule with a training step.
    """
    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.model_helpers import is_overridden

    if not isinstance(module, LightningModule):
        raise ValueError(f"`module` is a {type(module).__name__}. Give a LightningModule.")
    for hook in ("training_step", "configure_optimizers"):
        if not is_overridden(hook, module):
            raise ValueError(f"{type(module).__name__} has no `{hook}`, so there is no training to plan. Write one.")


# What a user says of the machine a plan is for: how many devices, how much memory and disk.


_COUNT = re.compile(r"\s*(\d+)\s*x\s*(\S.*)", re.IGNORECASE)


def counted(name: str) -> tuple[int | None, str]:
    """`8x A100 80GB` as 8 and `A100 80GB`; None where a name says no number.

    Raises:
        ValueError: If it says there are none.
    """
    match = _COUNT.fullmatch(name)
    if match is None:
        return None, name
    count = int(match[1])
    if count < 1:
        raise ValueError(f"`--device {name}`: there must be at least one device.")
    return count, match[2].strip()


def devices_for(named: int | None, per_node: int, nodes: int, on_cpu: bool) -> Devices:
    """Devices to plan for: those that are named, on one machine, else those of the recipe.

    Args:
        named: Number in the device's name.
        per_node: `trainer.devices` of the recipe.
        nodes: `trainer.num_nodes` of the recipe.
        on_cpu: Whether the run is on the CPU.

    Raises:
        ValueError: If several processes are to share a CPU.
    """
    devices = Devices(named, 1) if named is not None else Devices(per_node, nodes)
    if on_cpu and devices.total > 1:
        raise ValueError(
            f"{devices.total} processes on CPUs are not planned for: they share memory and cores. Set "
            "`--trainer.devices 1`, or name a GPU with `--device`."
        )
    return devices
