"""`Target`: the device an estimate is made for, and how much of it may be used. Needs torch only to probe a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_memfit.device.catalogue import find_device
from lightning_memfit.device.runtime import RuntimeMemory, runtime_memory, safety_margin_bytes
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.kind import CPU, CUDA, DeviceKind, DeviceType

DEFAULT_CAPABILITY = (8, 0)
"""CUDA capability that is assumed for a device without a name; it decides the attention kernel."""

_DRIVERS = tuple(map(Path, ("/dev/kfd", "/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/nvhost-gpu", "/dev/dxg")))
"""Of AMD's and NVIDIA's drivers: for cards, for Jetson (two generations), and under WSL."""


@dataclass(frozen=True)
class Target:
    """A device, and how many bytes a run may use there."""

    name: str
    kind: DeviceType
    capacity_bytes: int | None
    """Memory that a run may take, context included; None if no device is known."""
    margin_bytes: int = 0
    """Part of the capacity to leave free."""
    capability: tuple[int, int] = DEFAULT_CAPABILITY
    runtime: RuntimeMemory | None = None
    """Memory outside the tensors on a CUDA device."""
    source: str = ""
    """Where the capacity comes from."""
    counts_tensors: bool = False
    """Whether the capacity is a limit on the bytes of live tensors (`MemoryLimit`), so that nothing else counts."""
    host_usable_bytes: int | None = None
    """Host memory beside the device that all ranks of this machine may use; None for another machine's device."""

    @property
    def device_kind(self) -> DeviceKind:
        """Capabilities of this device's type."""
        return DeviceKind.of(self.kind)

    @property
    def usable_bytes(self) -> int | None:
        """Capacity less the margin."""
        return None if self.capacity_bytes is None else max(0, self.capacity_bytes - self.margin_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain figures, ready for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "capacity_bytes": self.capacity_bytes,
            "margin_bytes": self.margin_bytes,
            "capability": list(self.capability) if self.device_kind.has_compute_capability else None,
            "source": self.source,
        }


def named_target(name: str) -> Target:
    """Make a target from the name of a device in the catalogue, a size such as `12GiB`, or `cpu` for this machine.

    Raises:
        ValueError: If the name is unknown.
    """
    if name.strip().lower() == CPU:
        return host_target()
    spec = find_device(name)
    return Target(
        name=spec.name,
        kind=CUDA,
        capacity_bytes=spec.memory_bytes,
        margin_bytes=safety_margin_bytes(spec.memory_bytes),
        capability=spec.compute_capability or DEFAULT_CAPABILITY,
        runtime=runtime_memory(spec.compute_capability),
        source=f"catalogue, {format_bytes(spec.memory_bytes)} in all" if spec.aliases or spec.flops else spec.source,
    )


def unnamed_target() -> Target:
    """A CUDA device of unknown size: the report has figures without a verdict."""
    return Target("a CUDA device", CUDA, None, runtime=runtime_memory(DEFAULT_CAPABILITY), source="none was named")


def host_target(limit_bytes: int | None = None) -> Target:
    """The CPU of this machine, with the available RAM or a limit on live tensors (`MemoryLimit`)."""
    if limit_bytes is not None:
        name, source = "this CPU under the recipe's MemoryLimit", "`limit` of MemoryLimit"
        return Target(name, CPU, limit_bytes, source=source, counts_tensors=True)
    from lightning_memfit.device.host import probe_host

    available = probe_host().available_bytes
    return Target(
        name="this CPU",
        kind=CPU,
        capacity_bytes=available,
        margin_bytes=safety_margin_bytes(available),
        source="RAM that is available now, cgroup limits considered",
    )


def live_target(indices: Iterable[int] | None = (0,), limits: Iterable[int] = ()) -> Target | None:
    """The GPU of this machine that torch calls "cuda", with what is free on it now; None without one.

    Args:
        indices: Numbers of those that a run takes, of which the one with the least room counts: every rank needs as
            much. Numbers that this machine hasn't are left out. None takes all that there are.
        limits: Limits that the run keeps (`MemoryLimit`), in bytes.

    Raises:
        ValueError: If none of them is here.
    """
    if not _driver_sees_gpu():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    wanted = list(range(count) if indices is None else indices)
    here = [index for index in wanted if 0 <= index < count]
    if not here:
        raise ValueError(
            f"CUDA device{'s' * (len(wanted) > 1)} {', '.join(map(str, wanted))}: this machine has {count}, numbered "
            "from 0. Take one of them (`trainer.devices`), or name the device (`--device`)."
        )
    limits = tuple(limits)
    return min((device_target(index, limits) for index in here), key=lambda target: target.usable_bytes or 0)


def device_target(index: int, limits: Iterable[int] = (), is_running: bool = False) -> Target:
    """A CUDA device that torch has in this process, with what a run may take there.

    Args:
        index: Its number.
        limits: Limits that the run keeps (`MemoryLimit`), in bytes: it sees a device of that size.
        is_running: Whether the run is the one that is going on in this process, so that all that the process has
            reserved is the run's. Before a run, only what its allocator keeps in its cache is.

    Raises:
        RuntimeError: If there is no CUDA device.
        ValueError: If the index is out of range, or it is an AMD device.
    """
    import torch

    from lightning_memfit.device.host import probe_host
    from lightning_memfit.device.probe import probe_device

    state = probe_device(index)
    host = probe_host().available_bytes
    if torch.version.hip is not None:
        raise ValueError(f"{state.name} is an AMD device, whose context, libraries and kernels are not modelled.")
    runtime = runtime_memory(state.compute_capability)
    # The context that the probe made here is counted as that of the run, and a limit doesn't count it.
    context = runtime.context_bytes
    total = min([state.total_bytes, *(limit + context for limit in limits)])
    available = state.free_bytes + state.reserved_bytes if is_running else state.available_bytes
    source = f"{'available to this run' if is_running else 'free now'} of {format_bytes(state.total_bytes)}"
    return Target(
        name=state.name,
        kind=CUDA,
        capacity_bytes=min(total, available + context),
        margin_bytes=safety_margin_bytes(total),
        capability=state.compute_capability,
        runtime=runtime,
        source=source if total > available + context or total == state.total_bytes else "`limit` of MemoryLimit",
        host_usable_bytes=max(0, host - safety_margin_bytes(host)),
    )


def _driver_sees_gpu() -> bool:
    """Whether a driver of CUDA or ROCm has made its files, which is known at once: importing torch takes seconds."""
    return os.name == "nt" or any(path.exists() for path in _DRIVERS)
