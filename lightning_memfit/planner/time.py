"""Predict the time of a step: what it computes and moves, divided by a device's rates.

Roofline (Williams, Waterman & Patterson 2009) by phase instead of by operator: matrix products are bound by arithmetic,
everything else by the device's memory. With `F` FLOP/s of the products' dtype, `B` bytes/s of device memory, `L` of the
host link and `o` seconds to launch an operator, a micro-batch of `f` FLOPs, `b` bytes and `n` operators takes

    compute = f / F + b / B                       where operators run one after the other (CPU): + n o
    device  = max(compute, n o)                   where the host runs ahead of the device (CUDA): the launch floor
    micro   = device + link / L                   or max(device, link / L) where traffic hides behind computing

and a step of `k` micro-batches takes `k micro + optimizer`. With several devices, gradients are exchanged during the
backward pass and weights are gathered during forward and backward: whatever takes longer than the backward pass, two
thirds of `device`, is added. Exchanges after the step are added whole, as are reads and writes of a drive.

The optimizer step is elementwise: its bytes over `B`, with the number of passes by family from `core.step_cost`;
on the CPU, measured seconds per parameter by family. If the host steps, its cores or its memory limit the step. Rates
come from a catalogue or a short measurement (`rates_of`) and are corrected by measured steps (`calibrated`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lightning_memfit.device.catalogue import DeviceSpec, find_device
from lightning_memfit.estimate.target import Target
from lightning_memfit.memory.cache_files import default_cache_folder, read_entry, write_entry
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.step_cost import FOREACH_PASSES, cpu_seconds, num_trained

PHASES = ("forward", "backward")

_BACKWARD = 2 / 3
"""Share of a pass that is backward, during which gradients are exchanged: two of three products."""

COMPONENTS = ("arithmetic", "memory", "launch", "link", "interconnect", "disk", "optimizer")
"""What step time is made of, and what calibration corrects separately."""

RECOMPUTED_OPERATOR: Mapping[str, float] = {"full": 4.0, "keep_matmul_attention": 12.0}
"""Cost of a recomputed operator to the program, in launches of a plain one: hooks around every saved tensor, and for
selective checkpointing a Python mode that sees all operators twice. `benchmarks/planner/operators` measures them."""


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

    def factor(self, component: str) -> float:
        """Correction of one component."""
        return self.factors.get(component, 1.0)

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


@dataclass(frozen=True)
class PassWork:
    """What forward and backward of one micro-batch compute and move."""

    flops: float
    traffic_bytes: float
    operators: float

    @classmethod
    def of(cls, profile: ModelProfile, micro_batch_size: int | None = None) -> PassWork:
        """Read the work off a profile; products grow with the micro-batch, traffic by what two traces show."""
        size = micro_batch_size or profile.micro_batch_size
        more = size - profile.micro_batch_size
        flops = sum(profile.flops.get(phase, 0) for phase in PHASES) * size / profile.micro_batch_size
        traffic = sum(profile.traffic.get(phase, 0) + more * profile.traffic_slopes.get(phase, 0.0) for phase in PHASES)
        return cls(flops, max(0.0, traffic), sum(profile.operators.get(phase, 0) for phase in PHASES))

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(
            self.flops + other.flops, self.traffic_bytes + other.traffic_bytes, self.operators + other.operators
        )

    def __mul__(self, factor: float) -> PassWork:
        return PassWork(self.flops * factor, self.traffic_bytes * factor, self.operators * factor)

    def recomputing(self, other: PassWork, operator_weight: float) -> PassWork:
        """The work of a pass that recomputes, `other`, beyond this one.

        Args:
            other: The same micro-batch with every block checkpointed alike.
            operator_weight: Launches of a plain operator that a recomputed one costs the program, hooks included.
        """
        more = other + self * -1.0
        return PassWork(more.flops, more.traffic_bytes, more.operators * operator_weight)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by component; `launch` is the part for which the device waits."""

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def pass_seconds(work: PassWork, rates: Rates, dtype: str) -> dict[str, float]:
    """Seconds of one micro-batch by component, without link traffic.

    Args:
        work: Work of the micro-batch.
        rates: Rates of the device.
        dtype: Dtype of matrix products.

    Raises:
        ValueError: If the device has no rate for the dtype.
    """
    if dtype not in rates.flops_per_s:
        known = ", ".join(rates.flops_per_s)
        raise ValueError(f"`dtype={dtype}`: {rates.name} has no known rate for it. Known: {known}.")
    arithmetic = work.flops / rates.flops_per_s[dtype] * rates.factor("arithmetic")
    memory = work.traffic_bytes / rates.bytes_per_s * rates.factor("memory")
    launch = work.operators * rates.launch_seconds * rates.factor("launch")
    if rates.asynchronous:
        launch = max(0.0, launch - arithmetic - memory)
    return {"arithmetic": arithmetic, "memory": memory, "launch": launch}


def step_seconds(
    work: PassWork,
    cost: Cost,
    plain: ModelProfile,
    rates: Rates,
    dtype: str,
    num_micro_batches: int,
) -> StepTime:
    """Seconds of one optimizer step.

    Args:
        work: Forward and backward of one micro-batch as traced, techniques and recomputation included.
        cost: Cost of all techniques together; of its work per micro-batch, only what a trace can't see is added.
        plain: Profile of the plain step, whose parameters the optimizer steps.
        rates: Rates of the device.
        dtype: Dtype of matrix products.
        num_micro_batches: Micro-batches per optimizer step.
    """
    seconds = pass_seconds(work, rates, dtype)
    seconds["memory"] += _staging_seconds(cost.micro_batch, rates)
    device = sum(seconds.values())
    link = _link_seconds(cost.micro_batch, rates)
    seconds["link"] = max(0.0, link - device) if cost.overlap else link
    seconds["interconnect"] = max(0.0, _interconnect_seconds(cost.micro_batch, rates) - _BACKWARD * device)
    seconds["disk"] = _disk_seconds(cost.micro_batch, rates)
    seconds = {name: value * num_micro_batches for name, value in seconds.items()}
    seconds["memory"] += _staging_seconds(cost.last_micro_batch, rates)
    seconds["link"] += _link_seconds(cost.step, rates)
    seconds["interconnect"] += max(0.0, _interconnect_seconds(cost.last_micro_batch, rates) - _BACKWARD * device)
    seconds["interconnect"] += _interconnect_seconds(cost.step, rates)
    seconds["disk"] += _disk_seconds(cost.step, rates)
    seconds["optimizer"] = _optimizer_seconds(cost.step, plain, rates) * rates.factor("optimizer")
    return StepTime(seconds)


_DTYPES = {"bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-mixed": "float16", "16-true": "float16"}


class TimeModel:
    """Step time of the settings of one workload.

    Args:
        plain: Profile of the step without techniques but the recipe's own adapters.
        rates: Rates of one device on a machine of its own.
        per_machine: Devices of each machine, which share it if a setting takes several.
        machines: Machines.
    """

    def __init__(self, plain: ModelProfile, rates: Rates, per_machine: int = 1, machines: int = 1) -> None:
        self._plain = plain
        self._rates = rates
        self._shared_rates = rates.shared(per_machine, machines)
        self._per_machine = per_machine
        self._costs: dict[Setting, Cost] = {}

    def step(self, setting: Setting, work: PassWork, num_micro_batches: int) -> StepTime:
        """Seconds of one optimizer step.

        Args:
            setting: Only its techniques and its number of devices count.
            work: Forward and backward of one micro-batch, recomputation included.
            num_micro_batches: Micro-batches per optimizer step.
        """
        cost, rates = self._cost(setting), self._shared_rates if setting.world_size > 1 else self._rates
        return step_seconds(work, cost, self._plain, rates, self._dtype(setting, cost), num_micro_batches)

    def micro_batch_seconds(self, setting: Setting, work: PassWork) -> float:
        """Seconds that forward and backward of one micro-batch compute."""
        return sum(pass_seconds(work, self._rates, self._dtype(setting, self._cost(setting))).values())

    def written_bytes(self, setting: Setting) -> int:
        """Bytes to the drive of a machine in every optimizer step."""
        each = self._per_machine if setting.world_size > 1 else 1
        return round(each * self._cost(setting).step.disk_written_bytes)

    def _cost(self, setting: Setting) -> Cost:
        """Cost of all techniques but checkpointing; what grows with the batch is for a micro-batch of one sample."""
        techniques = setting.without_sizes().without("checkpointing")
        if techniques not in self._costs:
            self._costs[techniques] = techniques.cost(self._plain)
        return self._costs[techniques]

    @staticmethod
    def _dtype(setting: Setting, cost: Cost) -> str:
        """Dtype of matrix products."""
        return _DTYPES.get(setting.precision) or cost.matmul_rate or "float32"


def _staging_seconds(work: Work, rates: Rates) -> float:
    return work.staged_bytes / rates.bytes_per_s * rates.factor("memory")


def _link_seconds(work: Work, rates: Rates) -> float:
    seconds = work.host_link_bytes / rates.link_bytes_per_s if rates.link_bytes_per_s else 0.0
    return seconds * rates.factor("link")


def _interconnect_seconds(work: Work, rates: Rates) -> float:
    if not work.interconnect_bytes:
        return 0.0
    if rates.interconnect_bytes_per_s is None:
        raise ValueError(f"How fast devices talk to each other is not known of {rates.name}. Plan for one device.")
    return work.interconnect_bytes / rates.interconnect_bytes_per_s * rates.factor("interconnect")


def _disk_seconds(work: Work, rates: Rates) -> float:
    if not work.disk_bytes:
        return 0.0
    if rates.disk_bytes_per_s is None:
        raise ValueError(f"The disk's rate is not known on {rates.name}. Measure it with `memfit doctor`.")
    return work.disk_bytes / rates.disk_bytes_per_s * rates.factor("disk")


def _optimizer_seconds(step: Work, plain: ModelProfile, rates: Rates) -> float:
    """Plain batched AdamW plus what techniques add or save, but never less than reading the weights once."""
    count = num_trained(plain)
    itemsize = max((p.itemsize for p in plain.parameters), default=4)
    least = itemsize * count / rates.bytes_per_s
    host = step.host_seconds / rates.num_cores  # below zero if techniques save some of it
    if step.host_bytes and rates.host_bytes_per_s:
        host = max(host, step.host_bytes / rates.host_bytes_per_s)
    launch = step.kernels * rates.launch_seconds
    if not rates.asynchronous:
        return max(least, cpu_seconds("adamw") * count / rates.num_cores + host) + launch
    device = (itemsize * FOREACH_PASSES * count + step.device_bytes) / rates.bytes_per_s
    return max(least, device) + host + launch


# --- rates before anything was measured on a device ------------------------------------------------------------------


_CUDA_LAUNCH = 8e-6
"""Seconds of Python and dispatch per operator of an eager training step; about 5 in forward, 10 with autograd."""
_CPU_LAUNCH = 8e-6

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
    return 2 * size**3 / _best_seconds(lambda: a @ a)


def _copy_rate() -> float:
    """Bytes read and written per second by an elementwise operator on more data than the caches hold."""
    import torch

    a = torch.ones(1 << 22)
    return 2 * a.nbytes / _best_seconds(lambda: a * 2.0)


def _best_seconds(run: object, repeats: int = 8) -> float:
    assert callable(run)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


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
        write_entry(self.path, {"steps": [{"seconds": dict(o.seconds), "measured": o.measured} for o in kept]})


def uncorrected(seconds: Mapping[str, float], rates: Rates) -> dict[str, float]:
    """Predicted seconds by component, without corrections from earlier measurements."""
    return {name: value / rates.factor(name) for name, value in seconds.items()}


def calibrated(rates: Rates, folder: Path | None = None) -> Rates:
    """Rates corrected by earlier measurements on that device, if there are any."""
    observations = CalibrationFile(rates.name, folder).load()
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
