"""`Sharding`: what a strategy does with weights, gradients and optimizer states, and what it moves in every step.

Traffic is per rank. A ring all-reduce of `b` bytes among `n` ranks moves `2 (n - 1) / n b` through each of them, a
reduce-scatter or an all-gather half of it (Patarasuk & Yuan 2009; Rajbhandari et al. 2020, section 7). With `w` bytes
of weights and `g` of gradients, in units of `(n - 1) / n`:

    stage 0      2 g once per step, during the last backward pass
    stage 1      2 g once per step, during the last backward pass, and w after the step
    stage 2      2 g per micro-batch during its backward pass, and w after the step
    stage 3      2 w + g per micro-batch: weights are gathered for forward and for backward

DeepSpeed's stages 1 and 2 all-reduce buckets of gradients, of which a rank keeps its part, instead of reduce-scattering
them (`use_multi_rank_bucket_allreduce`, on by default).
What is exchanged is copied into or out of a buffer on the way, except by DDP, whose gradients are in its buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memfit.estimate.deepspeed import OffloadTarget
from lightning_memfit.estimate.division import Division
from lightning_memfit.nvme.traffic import step_traffic
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.step_cost import FOREACH_PASSES, HOST_STEP_BYTES, cpu_seconds, num_trained

_MASTER_BYTES = 4
_DEEPSPEED_STEP_BYTES = 28
"""Bytes of device memory that DeepSpeed moves per parameter in addition to the optimizer: flattening, fp32 gradients,
their norm, scaling, and the new weights in half precision."""


@dataclass(frozen=True)
class Sharding:
    """What is divided among ranks, and what is kept off the device."""

    stage: int
    """0 replicates, 1 divides optimizer states, 2 also gradients, 3 also weights."""
    deepspeed: bool = False
    """DeepSpeed's layout: half-precision weights, and fp32 master weights with the states, without autocast."""
    optimizer: OffloadTarget = "none"
    """Where optimizer states are kept; they are stepped on the host where that isn't `none`."""
    parameters: OffloadTarget = "none"

    def weight_bytes(self, precision: str) -> int:
        """Bytes of one stored weight, and of its gradient, in one of Lightning's precisions."""
        half = precision.endswith("-true") or self.deepspeed
        return 2 if "16" in precision and half else 4

    @property
    def complexity(self) -> int:
        """How many parts have to work together; of two strategies that are as fast, the simpler one is better."""
        return self.stage + 4 * (self.optimizer != "none") + 4 * (self.parameters != "none") + 8 * self.on_disk

    @property
    def on_disk(self) -> bool:
        """Whether anything is on disk."""
        return "nvme" in (self.optimizer, self.parameters)

    @property
    def offloads(self) -> bool:
        """Whether anything is kept off the device."""
        return self.optimizer != "none" or self.parameters != "none"

    @classmethod
    def of(cls, division: Division) -> Sharding:
        """What the strategy of a run does that divides it in this way."""
        return cls(division.stage, division.deepspeed, division.offload_optimizer, division.offload_parameters)

    def division(self, name: str, ranks: int, ranks_per_machine: int, pin_memory: bool = False) -> Division:
        """How the strategy divides a run, with the sizes that it chooses itself."""
        pinned, offloaded = pin_memory and not self.on_disk, (self.optimizer, self.parameters)
        return Division(name, self.stage, ranks, ranks_per_machine, self.deepspeed, *offloaded, pinned)

    def cost(self, profile: ModelProfile, ranks: int, precision: str) -> Cost:
        """What the strategy adds to a step, per rank."""
        trained = num_trained(profile)
        every = sum(parameter.numel for parameter in profile.parameters if not parameter.shared_with)
        itemsize = self.weight_bytes(precision)
        crossing = (ranks - 1) / ranks
        weights, gradients = crossing * itemsize * every, crossing * itemsize * trained
        stepped = crossing * itemsize * trained
        micro, last, step = {
            0: (0.0, 2 * gradients, 0.0),
            1: (0.0, 2 * gradients, stepped),
            2: (2 * gradients, 0.0, stepped),
            3: (2 * weights + gradients, 0.0, 0.0),
        }[self.stage]
        copied = 2.0 * itemsize * (trained + (2 * every if self.stage == 3 else 0))
        in_passes = Work(interconnect_bytes=micro, staged_bytes=copied if self.stage >= 2 else 0.0)
        at_the_end = Work(interconnect_bytes=last, staged_bytes=copied if self.stage == 1 else 0.0)
        after = Work(interconnect_bytes=step) + self._optimizer(profile, trained, ranks)
        moved = self._moved(every / ranks, trained / ranks, itemsize)
        return Cost(in_passes, after, last_micro_batch=at_the_end) + moved

    def _optimizer(self, profile: ModelProfile, trained: int, ranks: int) -> Work:
        """Work that stepping a share, here or on the host, adds to stepping everything on the device."""
        share = trained / ranks
        stepped = trained if self.stage == 0 else share
        if profile.device == "cpu":
            plain = cpu_seconds("adamw")
            own = cpu_seconds("adamw_fused") if self.optimizer != "none" else plain
            return Work(host_seconds=own * stepped - plain * trained)
        if self.optimizer == "none":
            beside = _DEEPSPEED_STEP_BYTES * share if self.deepspeed else 0.0
            return Work(device_bytes=_MASTER_BYTES * FOREACH_PASSES * (stepped - trained) + beside)
        return Work(
            device_bytes=-_MASTER_BYTES * FOREACH_PASSES * trained,
            host_seconds=cpu_seconds("adamw_fused") * share,
            host_bytes=HOST_STEP_BYTES * share,
        )

    def _moved(self, every: float, trained: float, itemsize: int) -> Cost:
        """Traffic to host memory and disk for one rank's share of the parameters.

        Gradients go to the host in every micro-batch, where they are added to those of earlier micro-batches on the
        device. Weights that are stepped on the host come back after the step; weights kept there come twice per
        micro-batch.
        """
        down = 2.0 * itemsize * trained if self.optimizer != "none" else 0.0
        up = 2.0 * itemsize * every if self.parameters != "none" else 0.0
        back = itemsize * trained if self.optimizer != "none" and self.parameters == "none" else 0.0
        states = round(trained) if self.optimizer == "nvme" else 0
        weights = round(every) if self.parameters == "nvme" else 0
        once, twice = (step_traffic(states, weights, itemsize, micro_batches=count) for count in (0, 1))
        per_pass = twice.read_bytes - once.read_bytes
        return Cost(
            Work(host_link_bytes=down + up, disk_bytes=per_pass),
            Work(
                host_link_bytes=back,
                disk_bytes=once.read_bytes + once.written_bytes,
                disk_written_bytes=once.written_bytes,
            ),
            overlap=not self.on_disk,
        )
