"""`Bounds`: what a combination of techniques needs and takes at least, in closed form, before anything is traced."""

from __future__ import annotations

from functools import cached_property, lru_cache

from lightning_memfit.estimate.estimate import CUDA_ROUNDING
from lightning_memfit.memory import MemoryBreakdown, Tier, format_bytes
from lightning_memfit.planner.candidates import state_bytes
from lightning_memfit.planner.placement import NCCL_BYTES, Placement, Shape, deepspeed_placement
from lightning_memfit.planner.steady_state import Standing
from lightning_memfit.planner.time import Rates, StepTime, least_seconds
from lightning_memfit.planner.workload import Workload
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core import cost as step_cost
from lightning_memfit.techniques.core.cost import Cost
from lightning_memfit.techniques.core.setting import Setting

_DTYPES = {"bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-mixed": "float16", "16-true": "float16"}

_RESERVE = 0.03
"""Share of a device left free beside its margin: what putting a plan together from several traces may get wrong."""

_RESERVE_OF_TENSORS = 0.005
"""The same where only live tensors count: plans were 0.2 % below their runs at most (`benchmarks/planner/pairs`)."""

_DAY = 86400


class Bounds:
    """Limits of a workload, and what settings are bound by.

    Args:
        workload: What is trained, where.
        plain: Profile of the step without techniques.

    Attributes:
        withheld_bytes: Of the device, for what a trace of an earlier plan needed beyond its prediction.
    """

    def __init__(self, workload: Workload, plain: ModelProfile) -> None:
        self.workload = workload
        self.plain = plain
        self.withheld_bytes = 0
        self._shared = lru_cache(maxsize=None)(workload.rates.shared)

    # --- the device -------------------------------------------------------------------------------------------------

    @property
    def usable_bytes(self) -> int:
        """What a run may use of the device."""
        usable = self.workload.target.usable_bytes
        if usable is None:
            raise ValueError(
                "There is no GPU here and none was named. Pass for example `--device 'RTX 3060'` or 12GiB."
            )
        reserve = _RESERVE_OF_TENSORS if self.workload.target.counts_tensors else _RESERVE
        return int(usable * (1 - reserve)) - self.withheld_bytes

    @property
    def overhead_bytes(self) -> int:
        """What lies on the device outside of all tensors that a trace shows."""
        runtime = self.workload.target.runtime
        return runtime.context_bytes + runtime.allocated_bytes if runtime is not None else 0

    def over(self, needed_bytes: int, what: str = "needs") -> str:
        """`needs 13.1 GiB, 1.9 over`, in words."""
        excess = needed_bytes - self.usable_bytes
        return f"{what} {format_bytes(needed_bytes)}, {format_bytes(excess)} over"

    def least_bytes(self, setting: Setting) -> int:
        """Bytes of the device that no plan of these techniques gets below."""
        sharding = setting.sharding
        if sharding is not None and sharding.deepspeed:
            standing = self.placement(setting).standing
            return max(standing.kept_bytes, standing.step_bytes) + self.overhead_bytes
        itemsize = 2 if setting.precision.endswith("-true") and setting.precision != "32-true" else 4
        states = state_bytes(setting, self.plain, itemsize)
        if sharding is None:
            return states + self.overhead_bytes
        nccl = NCCL_BYTES if self.is_cuda else 0
        return states // (setting.world_size if sharding.stage == 3 else 1) + nccl + self.overhead_bytes

    # --- time -------------------------------------------------------------------------------------------------------

    def seconds(self, setting: Setting) -> float:
        """Seconds per step that no plan of these techniques gets below: products alone, and the step."""
        flops = sum(self.plain.flops.get(phase, 0) for phase in ("forward", "backward")) / self.plain.micro_batch_size
        per_step = flops * self.workload.samples_on_each(setting.world_size)
        cost = self.cost(setting)
        return least_seconds(per_step, cost, self.plain, self.rates(setting), self.dtype(setting, cost), 1)

    def rates(self, setting: Setting) -> Rates:
        """Of one of the setting's devices, which share their machines."""
        if setting.world_size == 1:
            return self.workload.rates
        return self._shared(self.per_machine(setting), self.workload.devices.machines)

    def per_machine(self, setting: Setting) -> int:
        """Devices of each machine that take part."""
        return self.workload.devices.per_machine if setting.world_size > 1 else 1

    def cost(self, setting: Setting) -> Cost:
        """Of all techniques but checkpointing, per micro-batch of one sample where it grows with the batch."""
        return setting.without_sizes().without("checkpointing").cost(self.plain)

    def dtype(self, setting: Setting, cost: Cost) -> str:
        """Of matrix products."""
        return _DTYPES.get(setting.precision) or cost.matmul_rate or "float32"

    # --- host memory and disk ---------------------------------------------------------------------------------------

    @property
    def is_cuda(self) -> bool:
        """Whether device and host are two."""
        return self.workload.target.device_kind.has_own_memory

    def placement(self, setting: Setting) -> Placement:
        """What DeepSpeed keeps where under a setting, by the table of the plain step's parameters."""
        sharding = setting.sharding
        assert sharding is not None
        assert sharding.deepspeed
        optimizer = setting.of_kind("optimizer")
        if optimizer is not None and optimizer.technique.states is not None:
            states, scratch = optimizer.technique.states.bytes_per_parameter(), False
        else:
            stepped = sum(p.numel * p.itemsize for p in self.plain.parameters if p.trainable and not p.shared_with)
            states, scratch = 4 * step_cost.state_bytes(self.plain) / max(1, stepped), True
        shape = Shape(self.plain.parameters, states, scratch, self._buffer_bytes)
        return deepspeed_placement(shape, sharding, setting.world_size, setting.precision, self.is_cuda)

    @cached_property
    def _buffer_bytes(self) -> int:
        return Standing.of(self.plain, CUDA_ROUNDING if self.is_cuda else 1).buffer_bytes

    def refuse_early(self, setting: Setting) -> str | None:
        """Why what DeepSpeed keeps elsewhere is too much, known before any trace; None otherwise."""
        sharding = setting.sharding
        if sharding is None or not sharding.deepspeed:
            return None
        return self.refuse_elsewhere(setting, self.placement(setting).elsewhere)

    def refuse_elsewhere(self, setting: Setting, elsewhere: MemoryBreakdown) -> str | None:
        """Why what lies elsewhere than on the devices is too much for a machine; None where it isn't."""
        limits, each = self.workload.limits, self.per_machine(setting)
        host = elsewhere.total(Tier.HOST) + elsewhere.total(Tier.PINNED_HOST)
        disk = elsewhere.total(Tier.DISK)
        among = f" for {each} devices" if each > 1 else ""
        for what, needed, limit in (
            ("host memory", host, limits.host_bytes),
            ("page-locked host memory", elsewhere.total(Tier.PINNED_HOST), limits.pinned_bytes),
            ("disk", disk, limits.disk_bytes),
        ):
            if limit is None or each * needed <= limit:
                continue
            needs = f"needs {format_bytes(each * needed)} of {what}{among}"
            if what == "disk" and not limit:
                return f"{needs}, and there is none that may be used (`--disk`)"
            return f"{needs}, {format_bytes(each * needed - limit)} over the {format_bytes(limit)} there are"
        return None

    def written_bytes(self, setting: Setting) -> int:
        """To the drive of a machine in every optimizer step."""
        return round(self.per_machine(setting) * self.cost(setting).step.disk_written_bytes)

    def refuse_writes(self, setting: Setting, time: StepTime) -> str | None:
        """Why a plan writes too much to disk; None where it doesn't."""
        limit, written = self.workload.limits.disk_writes_per_day, self.written_bytes(setting)
        if limit is None or not written:
            return None
        per_day = round(written * _DAY / time.total)
        if per_day <= limit:
            return None
        return (
            f"writes {format_bytes(per_day)} per day to disk, {format_bytes(per_day - limit)} over the limit of "
            f"{format_bytes(limit)} (`--disk-writes-per-day`)"
        )
