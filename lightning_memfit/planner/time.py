"""Predict the time of a step: what it computes and moves, divided by a device's rates.

Roofline (Williams, Waterman & Patterson 2009) by operator: one of `f` FLOPs and `b` bytes takes `f / F + b / B`, with
`F` the rate of its kind and dtype and `B` that of memory, as a kernel's first loads and last stores hide behind
nothing; where a device was measured, the seconds of its kind at that size (`Rates.operator_seconds`). With `n`
operators, `o` seconds to issue one and `L` the host link's rate,

    compute = sum of operators                    where they run one after the other (CPU): + n o
    device  = max(compute, n o) in each phase     where the host runs ahead of the device (CUDA): the launch floor
    micro   = device + link / L                   or max(device, link / L) where traffic hides behind computing

and a step of `k` micro-batches takes `k micro + optimizer`. With several devices, gradients are exchanged during the
backward pass and weights are gathered during forward and backward: whatever takes longer than the backward pass, two
thirds of `device`, is added. Exchanges after the step are added whole, as are reads and writes of a drive.

The optimizer step is elementwise: its bytes over `B`, with the number of passes by family from `core.step_cost`;
on the CPU, measured seconds per parameter and per tensor by family. If the host steps, its cores or its memory limit
the step. Rates come from `planner.rates` and are corrected by measured steps (`calibrated`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_memfit.planner.rates import Floats, Rates
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.work import MULTIPLYING
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.step_cost import FOREACH_PASSES, cpu_step_seconds, num_trained

PHASES = ("forward", "backward")

_BACKWARD = 2 / 3
"""Share of a pass that is backward, during which gradients are exchanged: two of three products."""

RECOMPUTED: Mapping[str, tuple[float, float]] = {"full": (1.4, 28.0), "keep_matmul_attention": (9.6, 103.0)}
"""Cost of a recomputed operator and of a recomputed block to the program, in launches of a plain operator: a backward
pass inside another, and for selective checkpointing a Python mode that sees all operators twice.
`benchmarks/planner/operators` measures them."""


@dataclass(frozen=True, eq=False)
class PassWork:
    """What forward and backward of one micro-batch compute and move: arrays of one entry per row of like operators."""

    kinds: npt.NDArray[np.str_]
    """Kinds, as `profile.work` names them."""
    phases: npt.NDArray[np.str_]
    flops: Floats
    """FLOPs of one operator."""
    num_bytes: Floats
    """Bytes that one operator reads and writes."""
    counts: Floats
    """Operators; below zero in a difference."""
    launches: Floats
    """What issuing them costs the program, in plain operators."""

    @classmethod
    def of(cls, profile: ModelProfile, micro_batch_size: int | None = None) -> PassWork:
        """Read the work off a profile, at the traced micro-batch or another, by what two traces show."""
        more = (micro_batch_size or profile.micro_batch_size) - profile.micro_batch_size
        rows = [(phase, row) for phase in PHASES for row in profile.work.get(phase, ())]
        counts = np.array([row.times for _, row in rows], dtype=np.float64)
        return cls(
            np.array([row.kind for _, row in rows], dtype=np.str_),
            np.array([phase for phase, _ in rows], dtype=np.str_),
            np.array([max(0.0, row.flops + more * row.flops_per_sample) for _, row in rows], dtype=np.float64),
            np.array([max(0.0, row.num_bytes + more * row.bytes_per_sample) for _, row in rows], dtype=np.float64),
            counts,
            counts,
        )

    @classmethod
    def of_products(cls, flops: float, dtype: str) -> PassWork:
        """One product of so many FLOPs, which nothing launches: the least that they may take."""
        values = (np.array([value], dtype=np.float64) for value in (flops, 0.0, 1.0, 0.0))
        return cls(np.array([f"product {dtype}"]), np.array([PHASES[0]]), *values)

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(
            np.concatenate((self.kinds, other.kinds)),
            np.concatenate((self.phases, other.phases)),
            np.concatenate((self.flops, other.flops)),
            np.concatenate((self.num_bytes, other.num_bytes)),
            np.concatenate((self.counts, other.counts)),
            np.concatenate((self.launches, other.launches)),
        )

    def __mul__(self, factor: float) -> PassWork:
        return replace(self, counts=self.counts * factor, launches=self.launches * factor)

    def fused(self, share: float) -> PassWork:
        """The work when a compiler saves a share of the traffic of operators that don't multiply, and of launches."""
        left = np.array([1.0 if kind.startswith(MULTIPLYING) else 1.0 - share for kind in self.kinds.tolist()])
        return replace(self, counts=self.counts * left, launches=self.launches * left)

    def recomputing(self, other: PassWork, each: float, blocks: float) -> PassWork:
        """The work of a pass that recomputes, `other`, beyond this one.

        Args:
            other: The same micro-batch with every block checkpointed alike.
            each: Launches of a plain operator that a recomputed one costs the program.
            blocks: Launches that all blocks cost besides.
        """
        more = other + self * -1.0
        launches = more.launches * each
        launches[-1:] += blocks
        return replace(more, launches=launches)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by component; `launch` is the part for which the device waits."""

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def pass_seconds(work: PassWork, rates: Rates, float32_as: str = "float32") -> dict[str, float]:
    """Seconds of one micro-batch by component, without link traffic.

    Args:
        work: Work of the micro-batch.
        rates: Rates of the device.
        float32_as: Rate at which products of float32 run: `tf32` where a technique allows it.
    """
    seconds = np.zeros(len(work.kinds))
    multiplies = np.zeros(len(work.kinds), dtype=np.bool_)
    for kind in dict.fromkeys(work.kinds.tolist()):
        rows = work.kinds == kind
        if kind.startswith(MULTIPLYING):
            multiplies |= rows
            kind = kind.replace("product float32", f"product {float32_as}")
        seconds[rows] = rates.operator_seconds(kind, work.flops[rows], work.num_bytes[rows])
    seconds *= work.counts * np.where(multiplies, rates.factor("arithmetic"), rates.factor("memory"))
    launch = rates.launch_seconds * rates.factor("launch") * work.launches
    waits = float(launch.sum())
    if rates.asynchronous:
        of_phases = [work.phases == phase for phase in PHASES]
        waits = sum(max(0.0, float(launch[rows].sum() - seconds[rows].sum())) for rows in of_phases)
    arithmetic, memory = (float(seconds[rows].sum()) for rows in (multiplies, ~multiplies))
    return {"arithmetic": arithmetic, "memory": memory, "launch": waits}


def step_seconds(
    work: PassWork,
    cost: Cost,
    plain: ModelProfile,
    rates: Rates,
    float32_as: str,
    num_micro_batches: int,
) -> StepTime:
    """Seconds of one optimizer step.

    Args:
        work: Forward and backward of one micro-batch as traced, techniques and recomputation included.
        cost: Cost of all techniques together; of its work per micro-batch, only what a trace can't see is added.
        plain: Profile of the plain step, whose parameters the optimizer steps.
        rates: Rates of the device.
        float32_as: Rate at which products of float32 run.
        num_micro_batches: Micro-batches per optimizer step.
    """
    seconds = pass_seconds(work.fused(cost.fused_share) if cost.fused_share else work, rates, float32_as)
    seconds["memory"] += _staging_seconds(cost.micro_batch, rates)
    seconds["launch"] += rates.batch_seconds * rates.factor("launch")
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
        return step_seconds(work, cost, self._plain, rates, cost.matmul_rate or "float32", num_micro_batches)

    def micro_batch_seconds(self, setting: Setting, work: PassWork) -> float:
        """Seconds that forward and backward of one micro-batch compute."""
        return sum(pass_seconds(work, self._rates, self._cost(setting).matmul_rate or "float32").values())

    def least_seconds(self, setting: Setting, flops: float) -> float:
        """Seconds of a step whose products take so many FLOPs, at the best rate, and of the optimizer.

        Args:
            setting: Only its techniques and its number of devices count.
            flops: Of forward and backward, of all micro-batches together.
        """
        work = PassWork.of_products(flops, _DTYPES.get(setting.precision, "float32"))
        return self.step(setting, work, 1).total

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
    host = step.host_seconds * rates.host_factor / rates.num_cores  # below zero if techniques save some of it
    if step.host_bytes and rates.host_bytes_per_s:
        host = max(host, step.host_bytes / rates.host_bytes_per_s)
    launch = step.kernels * rates.launch_seconds
    if not rates.asynchronous:
        plainly = cpu_step_seconds("adamw", plain) * rates.host_factor / rates.num_cores
        return max(least, plainly + host) + launch
    device = (itemsize * FOREACH_PASSES * count + step.device_bytes) / rates.bytes_per_s
    return max(least, device) + host + launch
