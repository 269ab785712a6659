from dataclasses import replace

import numpy as np
import pytest

from lightning_memfit.device.runtime import RuntimeMemory
from lightning_memfit.estimate.estimate import estimate_step, predict_peak_bytes, predict_total_bytes
from lightning_memfit.memory import MIB, Category
from lightning_memfit.profile.events import CATEGORIES, OUTSIDE, EventList
from lightning_memfit.profile.record import ModelProfile

RUNTIME = RuntimeMemory(500 * MIB, workspace_bytes=32 * MIB, num_workspaces=2, source="", lt_workspace_bytes=MIB)


def profile_of(course, device="cuda"):
    """A profile of `(phase, name, operator, MiB)`: a name is allocated, and freed where it comes again."""
    numbers, events, sizes, operators, phases = {}, [], [], [], []
    for phase, name, operator, size in course:
        if phase and (not phases or phases[-1][1] != phase):
            phases.append((len(events), phase))
        if name in numbers:
            events.append(-(numbers.pop(name) + 1))
            continue
        numbers[name] = len(sizes)
        events.append(len(sizes) + 1)
        sizes.append(int(size * MIB))
        operators.append(f"layer | {operator}")
    count = len(sizes)
    made = EventList(
        events=np.array(events),
        event_blocks=np.full(len(events), OUTSIDE),
        sizes=np.array(sizes),
        categories=np.full(count, CATEGORIES.index(Category.ACTIVATION)),
        sites=np.arange(count),
        site_names=tuple(operators),
        phases=tuple(phases),
    )
    return ModelProfile(name="", events=made, micro_batch_size=1, device=device)


STEP = [
    ("", "weight", "", 30),
    ("forward", "x", "aten.embedding.default", 20),
    ("forward", "y", "aten.addmm.default", 12),
    ("forward", "x", "", 0),
    ("forward", "z", "aten.gelu.default", 19.25),
    ("backward", "d", "aten.mul.Tensor", 40),
    ("backward", "e", "aten.mm.default", 12),
    ("step", "d", "", 0),
]


def test_allocated_bytes_are_whole_blocks():
    found = estimate_step(profile_of(STEP))
    assert found.tensor_bytes == (30 + 12 + 19.25 + 40 + 12) * MIB
    assert found.spare_bytes == 0.75 * MIB  # `z` gets the block of `x`, of which too little would remain
    assert found.allocated_bytes == found.tensor_bytes + found.spare_bytes == found.by_phase["backward"]
    assert found.breakdown.get(Category.FRAGMENTATION) == found.reserved_bytes - found.tensor_bytes
    assert found.breakdown.total() == found.total_bytes
    assert predict_peak_bytes(profile_of(STEP), 1) == found.tensor_bytes


def test_the_host_allocates_what_tensors_take():
    found = estimate_step(profile_of(STEP, "cpu"))
    assert (found.spare_bytes, found.workspace_bytes) == (0, 0)
    assert found.allocated_bytes == found.tensor_bytes == found.total_bytes


def test_workspaces_come_with_a_threads_first_product():
    profile = profile_of(STEP)
    found, bare = estimate_step(profile, runtime=RUNTIME), estimate_step(profile)
    assert found.workspace_bytes == (32 + 1 + 32) * MIB  # backward adds no bias
    assert found.by_phase["forward"] - bare.by_phase["forward"] == 33 * MIB
    assert predict_peak_bytes(profile, 1, RUNTIME) == found.tensor_bytes + found.workspace_bytes
    assert predict_total_bytes(profile, 1, RUNTIME) == found.total_bytes
    before = [("forward", "before", "aten.mul.Tensor", 400), ("forward", "before", "", 0)]
    early = profile_of([STEP[0], *before, *STEP[1:]])
    assert estimate_step(early, runtime=RUNTIME).by_phase["forward"] == (30 + 400) * MIB


def test_recomputation_takes_a_workspace_for_biases_in_backward():
    recomputed = [STEP[0], *STEP[1:5], ("backward", "r", "aten.addmm.default", 12), *STEP[5:]]
    assert estimate_step(profile_of(recomputed), runtime=RUNTIME).workspace_bytes == 66 * MIB


def test_workspaces_break_large_cached_blocks():
    """A second step needs a new segment where a workspace that stays lies in the cached block of the first."""
    logits = [("forward", "logits", "aten.mul.Tensor", 400), ("forward", "logits", "", 0)]
    first = [STEP[0], ("forward", "y", "aten.addmm.default", 12), *logits, ("backward", "e", "aten.mm.default", 12)]
    again = [("step", "e", "", 0), *logits]
    assert estimate_step(profile_of(first + again), runtime=RUNTIME).reserved_bytes > 800 * MIB
    assert estimate_step(profile_of(first), runtime=RUNTIME).reserved_bytes < 500 * MIB


def test_what_a_trace_without_products_hides_is_counted():
    hidden = [(phase, name, "other.op.default", size) for phase, name, _, size in STEP]
    assert estimate_step(profile_of(hidden), runtime=RUNTIME).workspace_bytes == 64 * MIB
    one = replace(RUNTIME, num_workspaces=1)
    assert estimate_step(profile_of(hidden), runtime=one).workspace_bytes == 32 * MIB


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_peak_is_of_the_steps_alone(device):
    course = [("", "building", "", 300), ("", "building", "", 0), *STEP]
    assert estimate_step(profile_of(course, device)).allocated_bytes < 200 * MIB
