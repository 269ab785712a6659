"""`Placement`: what a strategy keeps on one rank's device, in host memory and on disk, in closed forms without a trace.

Torch's strategies (DDP, FSDP2) divide what a trace shows. DeepSpeed keeps other tensors than a trace shows: weights in
half precision, fp32 master weights with the states, buckets. `estimate.deepspeed` counts them, and the strategies' own
checks use the same model before a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_memfit.estimate.deepspeed import NCCL_BYTES, DeepSpeedRun, deepspeed_memory
from lightning_memfit.estimate.steady_state import HELD, SteadyState, later_phases, released_levels
from lightning_memfit.memory import MIB, Category, MemoryBreakdown, Tier
from lightning_memfit.memory.conversion import bytes_by_block
from lightning_memfit.memory.parameters import ParameterInfo, trained
from lightning_memfit.profile.record import ModelProfile

_BUCKET_BYTES = 25 * MIB
"""Size of DDP's buckets, by default (`bucket_cap_mb`)."""


@dataclass(frozen=True)
class Placement:
    """What one rank keeps all the time."""

    standing: SteadyState
    """Bytes on its device."""
    elsewhere: MemoryBreakdown = field(default_factory=MemoryBreakdown)
    """Bytes in host memory, at its largest moment, and on disk."""


def deepspeed_placement(run: DeepSpeedRun) -> Placement:
    """What DeepSpeed keeps on every rank.

    Host memory is counted as the strategies check it (`strategies.host_check`, `nvme.preflight`): at the largest moment
    once the model is built, including what libraries take, and only if something is offloaded. If the CPU is the
    device, live tensors of all memory count as the device's.
    """
    memory = deepspeed_memory(run).once_built()
    device, peak_bytes = memory.on_device(memory.around_passes), memory.device_peak_bytes
    if run.on_cpu:
        peak_bytes = memory.host_peak_bytes - memory.host_peak[1].get(Category.RUNTIME_CONTEXT, Tier.HOST)
    total = device.total()
    standing = SteadyState(
        kept_bytes=total,
        backward_bytes=total,
        step_bytes=max(total, peak_bytes),
        state_bytes=device.get(Category.OPTIMIZER_STATE),
        parameter_bytes=device.get(Category.PARAMETER),
        buffer_bytes=device.get(Category.BUFFER),
        gradient_bytes=device.get(Category.GRADIENT),
        communication_bytes=device.get(Category.COMMUNICATION),
    )
    return Placement(standing, memory.beside_device)


def torch_placement(
    whole: SteadyState,
    stage: int,
    ranks: int,
    parameters: Sequence[ParameterInfo],
    cuda: bool = True,
    copies_gradients: bool = False,
) -> Placement:
    """What DDP or FSDP2 keeps on every rank, derived from a trace of one device that holds everything.

    DDP keeps gradients in its buckets, of which the module's gradients are views or copies: backward makes each of them
    and moves it there. Before the forward pass of the second step the buckets are made anew, one by one, in the order
    in which gradients arrived (`Reducer::rebuild_buckets`). FSDP2 gathers the running block and the next one, whose
    whole gradients are on every rank too.
    """
    nccl = NCCL_BYTES if cuda and ranks > 1 else 0
    if stage == 0:
        return Placement(_beside_buckets(whole, nccl, parameters, copies_gradients))
    divided = {name: -(-getattr(whole, name) // ranks) for name in ("parameter_bytes", "gradient_bytes", "state_bytes")}
    gathered = gathered_bytes(parameters) + nccl
    less = sum(getattr(whole, name) - size for name, size in divided.items())
    scratch = max(0, whole.step_bytes - whole.kept_bytes)
    shard = _moved(replace(whole, **divided), gathered - less)
    return Placement(replace(shard, step_bytes=shard.kept_bytes + -(-scratch // ranks), communication_bytes=gathered))


def ddp_rank(profile: ModelProfile, ranks: int, copies_gradients: bool) -> tuple[dict[str, int], str, MemoryBreakdown]:
    """Bytes of tensors of a rank under DDP by moment, the moment of the peak, and what there is then.

    It is what a trace of one device shows, with gradients in buckets or beside them.

    Raises:
        ValueError: If the trace shows no second step like the first.
    """
    events, rounding = profile.events, profile.device_kind.rounding_bytes
    spans = {name: later_phases(events, name) for name in ("forward", "backward")}
    plain, cuda = SteadyState.of(profile, rounding), profile.device_kind.has_own_memory
    standing = torch_placement(plain, 0, ranks, profile.parameters, cuda, copies_gradients).standing
    live, (without, coming) = events.live_bytes(rounding), released_levels(events, rounding, HELD)
    held = live - without if copies_gradients else np.full_like(live, standing.gradient_bytes)
    levels = (live if copies_gradients else coming + standing.gradient_bytes) + standing.communication_bytes
    by_phase = {name: max(int(levels[first:stop].max()) for first, stop in of) for name, of in spans.items()}
    by_phase["step"] = standing.step_bytes
    phase = max(by_phase, key=lambda name: by_phase[name])
    found = (first + int(levels[first:stop].argmax()) for first, stop in spans.get(phase, []))
    highest = max(found, key=lambda at: int(levels[at]), default=None)
    kept = {
        Category.PARAMETER: standing.parameter_bytes,
        Category.BUFFER: standing.buffer_bytes,
        Category.GRADIENT: standing.gradient_bytes if highest is None else int(held[highest]),
        Category.OPTIMIZER_STATE: standing.state_bytes,
        Category.COMMUNICATION: standing.communication_bytes,
    }
    breakdown = MemoryBreakdown.device(kept)
    rest = Category.TEMPORARY if phase == "step" else Category.ACTIVATION
    return by_phase, phase, breakdown + MemoryBreakdown.device({rest: max(0, by_phase[phase] - breakdown.total())})


def _beside_buckets(
    whole: SteadyState, nccl: int, parameters: Sequence[ParameterInfo], copies_gradients: bool
) -> SteadyState:
    """What DDP keeps: views of its buckets instead of gradients, or gradients beside buckets that are as large."""
    sizes = [p.numel * p.itemsize for p in trained(parameters)]
    buckets = sum(sizes)
    if copies_gradients:
        moved = _moved(whole, nccl + buckets)
    else:
        moved = replace(
            _moved(whole, nccl),
            kept_bytes=whole.kept_bytes + nccl + buckets - whole.gradient_bytes,
            gradient_bytes=buckets,
            released_gradients=HELD,
        )
    one_more = max(*sizes, min(buckets, _BUCKET_BYTES), 0)
    return replace(moved, step_bytes=max(moved.step_bytes, moved.kept_bytes + one_more))


def _moved(standing: SteadyState, more_bytes: int) -> SteadyState:
    """The same steady state with this many more bytes at every moment."""
    return replace(
        standing,
        kept_bytes=standing.kept_bytes + more_bytes,
        backward_bytes=standing.backward_bytes + more_bytes,
        step_bytes=standing.step_bytes + more_bytes,
        communication_bytes=standing.communication_bytes + max(0, more_bytes),
    )


def gathered_bytes(parameters: Sequence[ParameterInfo]) -> int:
    """Bytes of whole weights and gradients that a rank under FSDP2 has at the peak of forward and backward.

    What is outside of all repeated blocks (`h.3.` in its names) is one group, and stays gathered. Of the blocks, one is
    running, the next one is gathered, and the buffer through which that happens or the gradients of one are there.
    """
    groups = bytes_by_block(parameters)
    outside = groups.pop("", 0)
    return outside + 3 * max(groups.values(), default=0)
