"""What a rank under DeepSpeed needs, of a step that was traced on one device that holds everything.

A trace shows activations and when gradients are made; `estimate.deepspeed` knows what else is kept, and where.
"""

from dataclasses import replace

import numpy as np

from lightning_memfit.estimate.deepspeed import PERSISTENT_NUMEL, DeepSpeedRun, deepspeed_memory
from lightning_memfit.estimate.steady_state import (
    HELD,
    LASTING,
    later_phases,
    released_levels,
    second_step,
)
from lightning_memfit.memory import Category, MemoryBreakdown, format_bytes
from lightning_memfit.memory.parameters import trained
from lightning_memfit.profile.events import CATEGORIES, OUTSIDE, Integers
from lightning_memfit.profile.record import ModelProfile


class NotDividedError(ValueError):
    """It isn't known what a strategy keeps on each rank."""


def zero_rank(profile: ModelProfile, run: DeepSpeedRun) -> tuple[dict[str, int], str, MemoryBreakdown]:
    """Bytes of tensors by moment, the moment of the peak, and what there is then.

    Host memory is counted at its own largest moment, and only if something is offloaded.

    Raises:
        ValueError: If the trace shows no second step like the first.
    """
    activations = int(max(moving_bytes(profile)[first:stop].max() for _, first, stop in passes_of(profile)))
    run = replace(run, activation_bytes=activations, passes_bytes=_passes_bytes(profile, run))
    memory = deepspeed_memory(run).once_built()
    names = {"setup": "setup", "passes": "forward and backward", "update": "step"}
    on_device = {shown: memory.on_device(memory.moments[name]) for name, shown in names.items()}
    by_phase = {name: moment.tensors().total() for name, moment in on_device.items()}
    phase = max(on_device, key=lambda name: on_device[name].total())
    breakdown = on_device[phase]
    if phase == names["passes"]:
        temporary = breakdown.get(Category.TEMPORARY)
        shown = min(activations, temporary)
        breakdown = breakdown.replace(Category.TEMPORARY, temporary - shown).replace(Category.ACTIVATION, shown)
    return by_phase, phase, breakdown + memory.beside_device


def passes_of(profile: ModelProfile) -> list[tuple[str, int, int]]:
    """Names and spans of forward and backward passes from the second step on."""
    return [(name, *span) for name in ("forward", "backward") for span in later_phases(profile.events, name)]


def moving_bytes(profile: ModelProfile) -> Integers:
    """Live bytes, after every event, of what comes and goes in a micro-batch."""
    events, rounding = profile.events, profile.device_kind.rounding_bytes
    moves = ~np.isin(events.categories, [CATEGORIES.index(category) for category in LASTING])
    sizes = np.where(moves, events.rounded_sizes(rounding), 0)
    return np.cumsum(np.sign(events.events) * sizes[events.storages])


def _passes_bytes(profile: ModelProfile, run: DeepSpeedRun) -> int:
    """Peak of forward and backward as DeepSpeed makes them, beyond buckets and what stays.

    Gradients are those of the first traced micro-batch, which stands here for the last one of a step. A bucket is
    reduced when the next gradient has no room in it, and when backward ends. While blocks are recomputed (an event in
    backward with the name of a module tells), `torch.utils.checkpoint` keeps all weights of a block gathered.
    """
    events, adds, highest = profile.events, run.stage == 1 and run.accumulates, 0
    kept, on_their_way = released_levels(events, profile.device_kind.rounding_bytes, HELD)
    coming, moving = on_their_way - kept, moving_bytes(profile)
    is_made = (events.categories == CATEGORIES.index(Category.GRADIENT))[events.storages] & (events.events > 0)
    sizes = np.where(is_made, events.sizes[events.storages], 0)
    in_module = np.array([" | " in name for name in events.site_names])[events.sites][events.storages]
    recomputes = in_module & (events.event_blocks != OUTSIDE) & (events.events > 0)
    for name, first, stop in passes_of(profile):
        size, way, last = sizes[first:stop], coming[first:stop], stop - first - 1
        in_blocks = recomputes[first:stop].any() and name == "backward"
        gathered = np.full_like(size, run.itemsize * (run.gathered_in_recomputation if in_blocks else run.gathered))
        level = moving[first:stop] + run.earlier_gradients
        if size.any():
            large = np.where(size > PERSISTENT_NUMEL * run.itemsize, size, 0)
            gathered = np.minimum(gathered, large.sum() - np.cumsum(large) + way)  # others are let go of for good
            level -= (np.cumsum(size) - way) * adds  # whole gradients, which are in buckets now
        level += gathered
        reduced = waiting = 0
        for at in [*np.flatnonzero(size).tolist(), last]:
            if waiting and (at == last or waiting + size[at] > run.bucket_size * run.itemsize):
                now = int(level[at]) + int(way[at]) * (at < last and not adds)
                highest = max(highest, now + run.copied(reduced, reduced + waiting))
                level[at:] += run.kept_gradients * (reduced == 0)
                reduced, waiting = reduced + waiting, 0
            waiting += int(size[at])
        way[last] = 0  # in a bucket, too
        highest = max(highest, int((level + way).max()))
    return highest


# --- optimizer states -------------------------------------------------------------------------------------------------

_NUMBER_BYTES = 8  # at most, of a single number such as the count of steps
_MAP_BYTES = (64, 1024)  # of 4-bit and 8-bit states, whose 16 and 256 values are fp32 in torchao and bitsandbytes
_SCALE_BLOCKS = (64, 128, 256)  # elements with one fp32 scale; by larger ones, factors of adapters look like scales


def why_states_stay_whole(profile: ModelProfile) -> str | None:
    """Why DeepSpeed can't divide the optimizer states of a traced step, or None if nothing is known against it."""
    try:
        state_bytes(profile)
    except NotDividedError as error:
        return str(error)
    except (IndexError, KeyError, ValueError):  # the trace shows no second step, of which `estimate_rank` tells
        return None
    return None


def state_bytes(profile: ModelProfile) -> float:
    """Bytes of optimizer states per trained element as DeepSpeed steps: over fp32 masters, not the traced weights.

    A state as large as its parameter has the parameter's dtype, and is fp32 under DeepSpeed.

    Raises:
        NotDividedError: If a state has no fixed number of values per element, as factors of a matrix have not: the flat
            parts of weights that DeepSpeed steps have no rows and columns. Sizes decide, by which the factors that SOAP
            keeps of a square matrix are states of its shape.
    """
    events, total = profile.events, 0.0
    parameters = {p.name: p for p in profile.parameters}
    alive = events.alive_at(second_step(events)["step"][1] - 1)
    states: dict[str, list[int]] = {}
    for storage in alive[events.categories[alive] == CATEGORIES.index(Category.OPTIMIZER_STATE)].tolist():
        name = events.site_names[events.sites[storage]].partition(" | ")[0]
        states.setdefault(name, []).append(int(events.sizes[storage]))
    for name, sizes in states.items():
        owner = parameters.get(name)
        for size in _factors(sizes, owner.numel if owner is not None else 1):
            raise NotDividedError(
                f"the states of {profile.optimizer} for `{name}` ({format_bytes(size)}) have no fixed number of "
                "values per element, and DeepSpeed steps flat parts of weights"
            )
        own = owner.numel * owner.itemsize if owner is not None else 0
        total += sum(4 * owner.numel if owner is not None and size == own else size for size in sizes)
    return total / max(1, sum(p.numel for p in trained(profile.parameters)))


def _factors(sizes: list[int], numel: int) -> list[int]:
    """Bytes of those of a parameter's states that have no fixed number of bits per element.

    Single numbers don't count, nor scales and maps where there are states of 8 or 4 bits.
    """
    quantized = {2 * size for size in sizes} & {numel, 2 * numel}
    # AdEMAMix has two moments, with their scales, in one state.
    scales = {4 * moments * -(-numel // block) for block in _SCALE_BLOCKS for moments in (1, 2)}
    beside = scales.union(_MAP_BYTES) if quantized else set()
    return [size for size in sizes if 2 * size % numel and size > _NUMBER_BYTES and size not in beside]
