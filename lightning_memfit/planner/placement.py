"""`Placement`: what a strategy keeps on one rank's device, in host memory and on disk. Closed forms, no trace.

Torch's strategies (DDP, FSDP2) divide what a trace shows. DeepSpeed keeps other tensors than a trace: weights in half
precision, fp32 master weights with the states, buckets. They are counted after DeepSpeed 0.19.8
(`runtime/zero/stage_1_and_2.py`, `stage3.py`) with the sizes that our strategies configure, and held against the
measured bytes of `benchmarks/results/strategies_cpu.json` by a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_memfit.estimate.sharding import largest_block_bytes
from lightning_memfit.estimate.zero_infinity import zero_infinity_states
from lightning_memfit.memory import MIB, Category, MemoryBreakdown, Tier
from lightning_memfit.nvme.sizing import AioSettings, infinity_sizes
from lightning_memfit.planner.steady_state import SteadyState
from lightning_memfit.profile.record import ParameterInfo
from lightning_memfit.strategies.zero_sizes import ModelSizes, sized
from lightning_memfit.techniques.core.sharding import Sharding

_MASTER = 4
"""Bytes of an fp32 master weight, of its gradient in the step, and of the step's scratch memory."""

NCCL_BYTES = 512 * MIB
"""What NCCL keeps on a device beside tensors; an assumption, as it depends on topology and version."""

_HOST_TIERS = (Tier.HOST, Tier.PINNED_HOST)


@dataclass(frozen=True)
class Placement:
    """What one rank keeps all the time."""

    standing: SteadyState
    """On its device."""
    elsewhere: MemoryBreakdown = field(default_factory=MemoryBreakdown)
    """In host memory and on disk."""


@dataclass(frozen=True)
class Shape:
    """A model as far as its placement depends on it; elements, tied parameters once."""

    parameters: Sequence[ParameterInfo]
    """All of them, tied ones included."""
    state_bytes: float
    """Of optimizer states per trained element, kept in fp32."""
    scratch: bool = True
    """Whether the optimizer's step makes a copy of what it steps."""
    buffer_bytes: int = 0

    @property
    def distinct(self) -> list[ParameterInfo]:
        """Parameters, tied ones once."""
        return [p for p in self.parameters if not p.shared_with]

    @property
    def total(self) -> int:
        """Elements."""
        return sum(p.numel for p in self.distinct)

    @property
    def trained(self) -> int:
        """Elements that are stepped."""
        return sum(p.numel for p in self.distinct if p.trainable)

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max((p.numel for p in self.distinct), default=0)


def deepspeed_placement(shape: Shape, sharding: Sharding, ranks: int, precision: str, cuda: bool = True) -> Placement:
    """What DeepSpeed keeps on every rank.

    Args:
        shape: Of the model, with the states of the optimizer that steps it.
        sharding: Of the strategy.
        ranks: That share the model.
        precision: Lightning's.
        cuda: Whether device and host are two.
    """
    itemsize = sharding.weight_bytes(precision)
    zero = sized({"stage": sharding.stage}, ModelSizes(shape.total, shape.largest), ranks)
    if sharding.on_disk:
        kept = _from_disk(shape, sharding, ranks, itemsize, zero)
    else:
        kept = _on_device(shape, sharding, ranks, itemsize, zero) + _on_host(shape, sharding, ranks, itemsize)
    step = _step_bytes(shape, sharding, ranks, itemsize, zero)
    nccl = NCCL_BYTES if cuda and ranks > 1 else 0
    kept += MemoryBreakdown.device({Category.BUFFER: shape.buffer_bytes, Category.COMMUNICATION: nccl})
    return _as_placement(kept, step, cuda)


def torch_placement(
    whole: SteadyState, sharding: Sharding, ranks: int, parameters: Sequence[ParameterInfo], cuda: bool = True
) -> Placement:
    """What DDP or FSDP2 keeps on every rank of what a trace shows of one device that holds everything.

    DDP keeps gradients in its buckets, and makes new ones in the order in which gradients came, once, while those
    before are alive. FSDP2 gathers the running block and the next one, whose whole gradients are on every rank, too.

    Args:
        whole: Read off a trace of the optimizer's steps.
        sharding: Of the strategy.
        ranks: That share the model.
        parameters: As they are stored.
        cuda: Whether device and host are two.
    """
    nccl = NCCL_BYTES if cuda and ranks > 1 else 0
    if sharding.stage == 0:
        return Placement(_moved(whole, whole.gradient_bytes + nccl))
    divided = {name: -(-getattr(whole, name) // ranks) for name in ("parameter_bytes", "gradient_bytes", "state_bytes")}
    gathered = 3 * largest_block_bytes(tuple(parameters)) + nccl
    less = sum(getattr(whole, name) - size for name, size in divided.items())
    scratch = max(0, whole.step_bytes - whole.kept_bytes)
    shard = _moved(replace(whole, **divided), gathered - less)
    return Placement(replace(shard, step_bytes=shard.kept_bytes + -(-scratch // ranks), communication_bytes=gathered))


def _moved(standing: SteadyState, more_bytes: int) -> SteadyState:
    """The same with so many bytes more at every moment."""
    return replace(
        standing,
        kept_bytes=standing.kept_bytes + more_bytes,
        backward_bytes=standing.backward_bytes + more_bytes,
        step_bytes=standing.step_bytes + more_bytes,
        communication_bytes=standing.communication_bytes + max(0, more_bytes),
    )


def _on_device(shape: Shape, sharding: Sharding, ranks: int, itemsize: int, zero: dict[str, int]) -> MemoryBreakdown:
    share = -(-shape.trained // ranks)
    sizes = {
        Category.PARAMETER: itemsize * (-(-shape.total // ranks) if sharding.stage == 3 else shape.total),
        Category.COMMUNICATION: itemsize * _communicated(shape, sharding, zero),
    }
    if sharding.parameters != "none":
        sizes[Category.PARAMETER] = 0
    if sharding.optimizer == "none":
        sizes[Category.GRADIENT] = itemsize * (share if sharding.stage >= 2 else shape.trained)
        sizes[Category.OPTIMIZER_STATE] = round((_MASTER + shape.state_bytes) * share)
    return MemoryBreakdown.device(sizes)


def _communicated(shape: Shape, sharding: Sharding, zero: dict[str, int]) -> int:
    """Elements of buffers.

    Below stage 3 two buckets that fill in turns, and one gradient on its way to the host; in stage 3 one bucket, and
    what may be gathered at a time.
    """
    bucket = zero["reduce_bucket_size"]
    if sharding.stage == 3:
        return bucket + min(zero["stage3_max_live_parameters"], shape.total)
    return 2 * bucket + (shape.largest if sharding.optimizer != "none" else 0)


def _on_host(shape: Shape, sharding: Sharding, ranks: int, itemsize: int) -> MemoryBreakdown:
    """Master weights, fp32 gradients, and in half precision: gradients that add up, and weights on their way back."""
    if not sharding.offloads:
        return MemoryBreakdown()
    share = -(-shape.trained // ranks)
    back = itemsize * share if sharding.stage < 3 else 0
    weights = itemsize * -(-shape.total // ranks) if sharding.parameters != "none" else 0
    pinned = {
        Category.PARAMETER: weights,
        Category.GRADIENT: (_MASTER + itemsize) * share,
        Category.OPTIMIZER_STATE: _MASTER * share,
        Category.COMMUNICATION: back,
    }
    states = {Category.OPTIMIZER_STATE: round(shape.state_bytes * share)}
    return MemoryBreakdown.on(Tier.PINNED_HOST, pinned) + MemoryBreakdown.on(Tier.HOST, states)


def _from_disk(shape: Shape, sharding: Sharding, ranks: int, itemsize: int, zero: dict[str, int]) -> MemoryBreakdown:
    groups = [[p.numel for p in shape.distinct if p.trainable]]
    aio = AioSettings()
    swapped = Counter(
        p.name.rpartition(".")[0] for p in shape.parameters if p.numel // ranks * itemsize >= aio.min_swapped_bytes
    )
    sizes = infinity_sizes(groups, ranks, itemsize, aio, params_per_module=max(swapped.values(), default=0))
    from_disk = sharding.parameters == "nvme"
    kept = zero_infinity_states(
        shape.parameters, sizes, ranks, offload_parameters=from_disk, bucket_size=zero["reduce_bucket_size"]
    )
    gathered = 0 if from_disk else itemsize * min(zero["stage3_max_live_parameters"], shape.total)
    return kept + MemoryBreakdown.device({Category.COMMUNICATION: gathered})


def _step_bytes(shape: Shape, sharding: Sharding, ranks: int, itemsize: int, zero: dict[str, int]) -> int:
    """What stepping on the device needs beside what is kept: fp32 gradients, and a copy that the optimizer makes.

    Below stage 3 the flattened gradients exist twice while they are widened, and then once less.
    """
    if sharding.optimizer != "none":
        return 0
    scratch = _MASTER if shape.scratch else 0
    share = -(-shape.trained // ranks)
    if sharding.stage == 3:
        return (_MASTER + scratch) * min(share, zero["sub_group_size"] + shape.largest // ranks)
    return (_MASTER + max(itemsize, scratch - itemsize)) * share


def _as_placement(kept: MemoryBreakdown, step_bytes: int, cuda: bool) -> Placement:
    if not cuda:  # host memory is the device's
        on_disk = MemoryBreakdown({key: size for key, size in kept.entries.items() if key[0] is Tier.DISK})
        sizes = Counter(kept.by_category())
        for tier in _HOST_TIERS:
            sizes.update(kept.by_category(tier))
        kept = MemoryBreakdown.device(sizes) + on_disk
    total = kept.total()
    standing = SteadyState(
        kept_bytes=total,
        backward_bytes=total,
        step_bytes=total + step_bytes,
        state_bytes=kept.get(Category.OPTIMIZER_STATE),
        parameter_bytes=kept.get(Category.PARAMETER),
        buffer_bytes=kept.get(Category.BUFFER),
        gradient_bytes=kept.get(Category.GRADIENT),
        communication_bytes=kept.get(Category.COMMUNICATION),
    )
    elsewhere = MemoryBreakdown({key: size for key, size in kept.entries.items() if key[0] is not Tier.DEVICE})
    return Placement(standing, elsewhere)
