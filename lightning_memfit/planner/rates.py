"""`Rates`: what a device reaches in training, from its data sheet, from a measurement, or from earlier runs.

`memfit doctor --measure` (`planner.measured`) keeps rates of operators by kind for a device; without it, a card takes
shares of its data sheet (`device.catalogue`), and a CPU is measured in about a quarter of a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_memfit.device.catalogue import DeviceSpec, find_device
from lightning_memfit.estimate.target import Target
from lightning_memfit.memory.cache_files import default_cache_folder, read_entry, write_entry

Floats = npt.NDArray[np.float64]

COMPONENTS = ("arithmetic", "memory", "launch", "link", "interconnect", "disk", "optimizer")
"""What step time is made of, and what calibration corrects separately."""

_UNALIGNED, _ATTENTION = {"tf32": 0.45, "bfloat16": 0.2, "float16": 0.2}, 0.55
"""Shares of a product's rate on CUDA: of one whose rows don't begin at multiples of 16 bytes (GPT-2's vocabulary of
50,257), and of fused attention. From the step times of GPT-2 on an H200 (docs/benchmarks/gpu.md)."""


@dataclass(frozen=True)
class Measured:
    """What `memfit doctor --measure` found of a device."""

    operators: Mapping[str, float]
    """By kind as `profile.work` names them: bytes per second of what moves, FLOPs of what multiplies beside that."""
    launch_seconds: float
    """Seconds per operator of a training step that the program takes to issue it."""
    host_factor: float
    """Seconds that a core of this host takes for one of the core on which optimizers' steps were measured."""
    link_bytes_per_s: float | None = None
    """Rate to pinned host memory, in one direction; None if host and device are one."""


@dataclass(frozen=True)
class Rates:
    """What a device reaches in training, not what its data sheet says."""

    name: str
    flops_per_s: Mapping[str, float]
    """FLOP/s by dtype of matrix products: `float32`, `tf32`, `bfloat16`, `float16`."""
    bytes_per_s: float
    launch_seconds: float
    """Seconds per operator that the program takes to issue it."""
    asynchronous: bool
    """Whether the device works while the program goes on."""
    link_bytes_per_s: float | None = None
    """Rate to pinned host memory, in one direction; None if host and device are one."""
    disk_bytes_per_s: float | None = None
    """Rate of a machine's drive, the same for reading and writing."""
    num_cores: float = 1
    """Cores that share host work."""
    host_bytes_per_s: float | None = None
    """Rate of a machine's memory; if None, only the cores limit host work."""
    interconnect_bytes_per_s: float | None = None
    """Rate at which one device sends to others of its machine while it receives as much."""
    network_bytes_per_s: float | None = None
    """Rate at which a machine sends to others while it receives as much."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Measured over predicted time by component; 1 if nothing was measured."""
    operators: Mapping[str, float] = field(default_factory=dict)
    """As those of `Measured`; none before it was measured."""
    batch_seconds: float = 0.0
    """Seconds that the Trainer takes for a batch beyond its operators."""
    host_factor: float = 1.0
    """As that of `Measured`."""

    def factor(self, component: str) -> float:
        """Correction of one component."""
        return self.factors.get(component, 1.0)

    def operator_seconds(self, kind: str, flops: Floats, num_bytes: Floats) -> Floats:
        """Seconds of operators of one kind beyond issuing them.

        Args:
            kind: As `profile.work` names it; `product tf32` for products of float32 that are rounded.
            flops: Shape (operators,).
            num_bytes: Shape (operators,).
        """
        name, dtype, unaligned = (*kind.split(), "", "")[:3]
        moving = num_bytes / self.operators.get("elementwise" if dtype else kind, self.bytes_per_s)
        if not dtype:
            return moving
        measured = self.operators.get(f"{name} {dtype}")
        rate = measured or self.flops_per_s.get("float8" if dtype.startswith("float8") else dtype, 0.0)
        rate = rate or self.flops_per_s["float32"]  # as dtypes without products of their own compute
        if self.asynchronous and unaligned:
            rate *= _UNALIGNED.get(dtype, 1.0)
        elif self.asynchronous and name == "attention" and measured is None:
            rate *= _ATTENTION
        return flops / rate + moving

    def shared(self, per_machine: int, machines: int = 1) -> Rates:
        """Rates of one of several devices, which share their machine's cores, memory and drive, and its network.

        A ring over several machines passes every byte through the network of each once, so its rate is the ring's.

        Args:
            per_machine: Devices of a machine.
            machines: Machines.
        """
        between = self.interconnect_bytes_per_s
        if machines > 1:
            known = [rate for rate in (between if per_machine > 1 else None, self.network_bytes_per_s) if rate]
            between = min(known, default=None)
        return replace(
            self,
            num_cores=self.num_cores / per_machine,
            disk_bytes_per_s=_part(self.disk_bytes_per_s, per_machine),
            host_bytes_per_s=_part(self.host_bytes_per_s, per_machine),
            interconnect_bytes_per_s=between,
        )


def _part(rate: float | None, parts: int) -> float | None:
    return None if rate is None else rate / parts


# --- rates before anything was measured on a device ------------------------------------------------------------------


_CUDA_LAUNCH, _CPU_LAUNCH = 2.5e-5, 8e-6
"""Seconds of Python and dispatch per operator of an eager training step, views left out: BERT-large on an H200, and
narrow models on a CPU (`benchmarks/planner/operators`)."""
_CUDA_BATCH, _CPU_BATCH = 1e-2, 1e-3
"""Seconds that a batch takes beside its operators: 12 and 14 ms with two models on an H200."""

_OF_NVLINK, _OF_PCIE_PEERS = 0.75, 0.4
"""Shares that collectives reach: NCCL's ring over NVLink; over PCIe through host memory, as consumer cards must."""

GLOO_BYTES_PER_S = 1e9
"""Assumed rate at which a process sends to others of its machine over gloo while it receives as much."""

NETWORK_BYTES_PER_S = 12.5e9
"""Bytes per second between machines: 100 Gbit/s, an assumption."""

DISK_BYTES_PER_S = 2e9
"""Rate that an NVMe drive sustains for hours, an assumption if none is measured; data sheets say two to three times as
much."""

HOST_BYTES_PER_S = 40e9
"""Bytes per second of host memory: two channels of DDR4-3200 at 0.8 of their rate."""

_STAND_INS = (("RTX 3060", 16), ("RTX 3090", 32), ("A100 40GB", 60), ("A100 80GB", 1 << 20))
"""Catalogue device whose rates are used when only the size is known, by the largest size in GiB for each."""


def rates_of(target: Target) -> Rates:
    """Rates of a planning target."""
    return cpu_rates() if target.kind == "cpu" else device_rates(target)


def device_rates(target: Target) -> Rates:
    """Rates of a CUDA device from the catalogue; a bare size uses the rates of a common card of that size."""
    known = _known(target.name)
    spec = known or _stand_in(target.capacity_bytes or 0)
    reached = spec.reached()
    assert reached.bytes_per_s is not None
    return Rates(
        name=known.name if known is not None else target.name,
        flops_per_s=dict(reached.flops),
        bytes_per_s=reached.bytes_per_s,
        launch_seconds=_CUDA_LAUNCH,
        batch_seconds=_CUDA_BATCH,
        asynchronous=True,
        link_bytes_per_s=reached.link_bytes_per_s,
        disk_bytes_per_s=DISK_BYTES_PER_S,
        num_cores=_cores(),
        host_bytes_per_s=HOST_BYTES_PER_S,
        interconnect_bytes_per_s=_between(spec),
        network_bytes_per_s=NETWORK_BYTES_PER_S,
    )


def _between(spec: DeviceSpec) -> float | None:
    if spec.peer_bytes_per_s is not None:
        return _OF_NVLINK * spec.peer_bytes_per_s
    return None if spec.host_link_bytes_per_s is None else _OF_PCIE_PEERS * spec.host_link_bytes_per_s


def _known(name: str) -> DeviceSpec | None:
    try:
        spec = find_device(name)
    except ValueError:
        return None
    return spec if spec.flops and spec.bandwidth_bytes_per_s else None


def _stand_in(capacity_bytes: int) -> DeviceSpec:
    return find_device(next(name for name, largest in _STAND_INS if capacity_bytes <= largest << 30))


def cpu_rates() -> Rates:
    """Rates of this CPU with torch's number of threads, measured in about a quarter of a second."""
    import torch

    flops = {name: _matmul_rate(dtype) for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))}
    flops["float16"] = flops["bfloat16"]
    return Rates(
        name=cpu_name(),
        flops_per_s=flops,
        bytes_per_s=_copy_rate(),
        launch_seconds=_CPU_LAUNCH,
        batch_seconds=_CPU_BATCH,
        asynchronous=False,
        disk_bytes_per_s=DISK_BYTES_PER_S,
        num_cores=torch.get_num_threads(),
        interconnect_bytes_per_s=GLOO_BYTES_PER_S,
        network_bytes_per_s=NETWORK_BYTES_PER_S,
    )


def cpu_name() -> str:
    """Name of this CPU's rates: they depend on the threads."""
    import torch

    return f"CPU, {torch.get_num_threads()} threads"


def _matmul_rate(dtype: object) -> float:
    import torch

    size = 384
    a = torch.ones(size, size, dtype=dtype)  # type: ignore[call-overload]
    return 2 * size**3 / seconds_of(lambda: a @ a)


def _copy_rate() -> float:
    """Bytes read and written per second by an elementwise operator on more data than the caches hold."""
    import torch

    a = torch.ones(1 << 22)
    return 2 * a.nbytes / seconds_of(lambda: a * 2.0)


def seconds_of(run: Callable[[], object], least_seconds: float = 0.05) -> float:
    """Median seconds of a call with all threads of this process, on any device.

    Args:
        run: What is called.
        least_seconds: How long to measure.
    """
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    median: float = timer.blocked_autorange(min_run_time=least_seconds).median
    return median


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- rates corrected by measured steps -------------------------------------------------------------------------------
# Steps are kept per device in the cache folder. Every observation is a step's predicted seconds by component and its
# measured seconds. The factors minimise the squared relative errors of their weighted sums, with a pull towards one
# common factor, so that a single observation scales everything alike and many tell the components apart (ridge
# regression, Hoerl & Kennard 1970; factors stay positive).


_MAX_OBSERVATIONS = 64
_PULL = 0.05
"""Weight of the common factor against one observation's relative error."""
_LOW, _HIGH = 0.1, 10.0


@dataclass(frozen=True)
class Observation:
    """One measured step."""

    seconds: Mapping[str, float]
    """Predicted seconds by component, from rates without correction."""
    measured: float


class CalibrationFile:
    """Observations of one device.

    Args:
        name: Name of the device; for a CPU with the number of threads.
        folder: Folder of the files; the cache folder by default.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        self.path = (folder or default_cache_folder()) / "rates" / f"{slug}.json"

    def load(self) -> list[Observation]:
        """What was measured; empty if there is no readable file."""
        entry = read_entry(self.path) or {}
        try:
            return [Observation(dict(row["seconds"]), float(row["measured"])) for row in entry.get("steps", [])]
        except (ValueError, KeyError, TypeError):
            return []

    def add(self, seconds: Mapping[str, float], measured: float) -> None:
        """Save an observation; if there are many, only the newest are kept.

        Args:
            seconds: Predicted by component, without corrections (`uncorrected`).
            measured: Seconds of the step.
        """
        kept = [*self.load(), Observation(seconds, measured)][-_MAX_OBSERVATIONS:]
        steps = [{"seconds": dict(o.seconds), "measured": o.measured} for o in kept]
        write_entry(self.path, {**(read_entry(self.path) or {}), "steps": steps})

    def measured(self) -> Measured | None:
        """What `memfit doctor --measure` kept; None if there is nothing readable."""
        entry = read_entry(self.path) or {}
        try:
            return Measured(**entry["device"])
        except (ValueError, KeyError, TypeError):
            return None

    def keep(self, measured: Measured) -> None:
        """Save what a measurement found; steps that were predicted without it are let go."""
        write_entry(self.path, {"device": asdict(measured)})


def uncorrected(seconds: Mapping[str, float], rates: Rates) -> dict[str, float]:
    """Predicted seconds by component, without corrections from earlier measurements."""
    return {name: value / rates.factor(name) for name, value in seconds.items()}


def calibrated(rates: Rates, folder: Path | None = None) -> Rates:
    """Rates as `memfit doctor --measure` found them, and corrected by earlier runs, if there are any."""
    file = CalibrationFile(rates.name, folder)
    if (found := file.measured()) is not None:
        rates = replace(
            rates,
            operators=found.operators,
            launch_seconds=found.launch_seconds,
            host_factor=found.host_factor,
            link_bytes_per_s=found.link_bytes_per_s or rates.link_bytes_per_s,
        )
    observations = file.load()
    return replace(rates, factors=fit_factors(observations)) if observations else rates


def fit_factors(observations: Sequence[Observation], rounds: int = 200) -> dict[str, float]:
    """Factor of every component, by coordinate descent; each is between 0.1 and 10."""
    measured = np.array([o.measured for o in observations])
    shares = np.array([[o.seconds.get(name, 0.0) for name in COMPONENTS] for o in observations]) / measured[:, None]
    totals = shares.sum(axis=1)
    common = float(np.clip((totals @ np.ones(len(totals))) / max(float(totals @ totals), 1e-30), _LOW, _HIGH))
    factors = np.full(len(COMPONENTS), common)
    for _ in range(rounds):
        for index in range(len(COMPONENTS)):
            column = shares[:, index]
            rest = 1.0 - shares @ factors + column * factors[index]
            # The pull counts relative to the common factor, whatever its size.
            pull = _PULL / common**2
            factors[index] = (column @ rest + pull * common) / (column @ column + pull)
            factors[index] = np.clip(factors[index], _LOW, _HIGH)
    return {name: float(value) for name, value in zip(COMPONENTS, factors, strict=True)}
