"""Step time from work: what a step computes and moves, divided by a device's rates.

Roofline (Williams, Waterman & Patterson 2009) by phase instead of by operator: matrix products are bound by arithmetic,
everything else by the device's memory. With `F` FLOP/s of the products' dtype, `B` bytes/s of device memory, `L` of the
host link and `o` seconds to launch an operator, a micro-batch of `f` FLOPs, `b` bytes and `n` operators takes

    compute = f / F + b / B                       where operators run one after the other (CPU): + n o
    device  = max(compute, n o)                   where the host runs ahead of the device (CUDA): the launch floor
    micro   = device + link / L                   or max(device, link / L) where traffic hides behind computing

and a step of `k` micro-batches `k micro + optimizer`. Of several devices, gradients are exchanged beside the backward
pass and weights gathered beside forward and backward: what takes longer than two thirds of `device`, the backward pass,
is added. What is exchanged after the step is added whole, and so is reading and writing a drive.

The optimizer step is elementwise: its bytes over `B`, with the number of passes by family from `techniques.step_cost`;
on the CPU seconds per parameter measured by family. Where the host steps, it takes as long as its cores or its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.cost import Cost, Work
from lightning_memfit.techniques.step_cost import CPU_SECONDS, FOREACH_PASSES, num_trained

PHASES = ("forward", "backward")

_BACKWARD = 2 / 3
"""Share of a pass that is backward, beside which gradients are exchanged: two of three products."""

COMPONENTS = ("arithmetic", "memory", "launch", "link", "interconnect", "disk", "optimizer")
"""What step time is made of, and what calibration corrects separately."""

RECOMPUTED_OPERATOR: Mapping[str, float] = {"full": 4.0, "keep_matmul_attention": 12.0}
"""Launches of a plain operator that one which is recomputed costs the program: hooks around every saved tensor, and for
selective checkpointing a mode in Python that sees all operators twice. `benchmarks/planner/operators` measures them."""


@dataclass(frozen=True)
class Rates:
    """What a device reaches in training, not what its data sheet says."""

    name: str
    flops_per_s: Mapping[str, float]
    """By dtype of matrix products: `float32`, `tf32`, `bfloat16`, `float16`."""
    bytes_per_s: float
    launch_seconds: float
    """Per operator, of the program that issues it."""
    asynchronous: bool
    """Whether the device works while the program goes on."""
    link_bytes_per_s: float | None = None
    """To pinned host memory, one direction; None where host and device are one."""
    disk_bytes_per_s: float | None = None
    """Of a machine's drive, reading as much as writing."""
    num_cores: float = 1
    """That host work is spread over."""
    host_bytes_per_s: float | None = None
    """Of a machine's memory; None leaves host work to the cores."""
    interconnect_bytes_per_s: float | None = None
    """That one device sends to others of its machine while it receives as much."""
    network_bytes_per_s: float | None = None
    """That a machine sends to others while it receives as much."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Measured over predicted time by component; 1 where nothing was measured."""

    def factor(self, component: str) -> float:
        """Correction of one component."""
        return self.factors.get(component, 1.0)

    def shared(self, per_machine: int, machines: int = 1) -> Rates:
        """Rates of one of several devices, which share their machine's cores, memory and drive, and its network.

        A ring over several machines passes every byte through the network of each once, so that its rate is the ring's.

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
        """What a pass that recomputes, `other`, does beyond this one.

        Args:
            other: The same micro-batch with every block checkpointed alike.
            operator_weight: Launches of a plain operator that a recomputed one costs the program, hooks included.
        """
        more = other + self * -1.0
        return PassWork(more.flops, more.traffic_bytes, more.operators * operator_weight)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by component; `launch` is the part that the device waits for."""

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def pass_seconds(work: PassWork, rates: Rates, dtype: str) -> dict[str, float]:
    """Seconds of one micro-batch by component, link traffic left out.

    Args:
        work: Of the micro-batch.
        rates: Of the device.
        dtype: Of matrix products.

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
        cost: Of all techniques together; of its work per micro-batch only what a trace can't see is added.
        plain: Profile of the plain step, whose parameters the optimizer steps.
        rates: Of the device.
        dtype: Of matrix products.
        num_micro_batches: Per optimizer step.
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


def least_seconds(flops: float, cost: Cost, plain: ModelProfile, rates: Rates, dtype: str, num_micro: int) -> float:
    """A bound that no setting of these techniques gets below: products alone, once per micro-batch, and the step."""
    step = step_seconds(PassWork(flops, 0.0, 0.0), cost, plain, rates, dtype, num_micro)
    return step.total


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
    """The plain batched AdamW and what techniques add to or save of it; never less than reading the weights once."""
    count = num_trained(plain)
    itemsize = max((p.itemsize for p in plain.parameters), default=4)
    least = itemsize * count / rates.bytes_per_s
    host = step.host_seconds / rates.num_cores  # below zero where techniques save some of it
    if step.host_bytes and rates.host_bytes_per_s:
        host = max(host, step.host_bytes / rates.host_bytes_per_s)
    launch = step.kernels * rates.launch_seconds
    if not rates.asynchronous:
        return max(least, CPU_SECONDS["adamw"] * count / rates.num_cores + host) + launch
    device = (itemsize * FOREACH_PASSES * count + step.device_bytes) / rates.bytes_per_s
    return max(least, device) + host + launch
