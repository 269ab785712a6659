"""The allocator model against cases worked out by hand from torch's rules, invariants, and a real device."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.device.allocator import CachingAllocator
from lightning_memfit.memory import MIB


def test_small_requests_share_a_segment_of_two_mib():
    allocator = CachingAllocator()
    allocator.malloc("a", 1)
    allocator.malloc("b", 513)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512 + 1024, 2 * MIB)


def test_middling_requests_share_a_segment_of_twenty_mib():
    allocator = CachingAllocator()
    allocator.malloc("a", MIB + 1)
    allocator.malloc("b", 9 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (10 * MIB + 512, 20 * MIB)


@pytest.mark.parametrize(("size", "segment"), [(10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (33 * MIB, 34 * MIB)])
def test_large_requests_get_their_own_segment(size, segment):
    allocator = CachingAllocator()
    allocator.malloc("a", size)
    assert allocator.reserved_bytes == segment


def test_a_rest_of_one_mib_or_less_is_not_split_off():
    allocator = CachingAllocator()
    allocator.malloc("a", 20 * MIB)
    allocator.free("a")
    allocator.malloc("b", 19 * MIB)
    assert allocator.allocated_bytes == 20 * MIB
    allocator.free("b")
    allocator.malloc("c", 19 * MIB - 512)
    assert allocator.allocated_bytes == 19 * MIB - 512


def test_freed_blocks_are_reused_best_fit_first():
    allocator = CachingAllocator()
    for name, size in (("big", 40 * MIB), ("middle", 14 * MIB), ("small", 12 * MIB)):
        allocator.malloc(name, size)
    for name in ("big", "middle", "small"):
        allocator.free(name)
    allocator.malloc("x", 13 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (14 * MIB, 66 * MIB)  # the rest stays on
    assert 40 * MIB in [size for _, size in allocator.cached_blocks()]


def address_of(allocator, identity):
    return {name: address for name, address, _ in allocator.blocks_in_use()}[identity]


def test_later_segments_lie_below_and_the_rests_of_their_pages_are_filled_first():
    # The first segments of a run of GPT-2 on an H200, driver 580, in MiB above the lowest of them.
    segments = {"a": 48, "b": 48, "c": 48, "d": 12, "e": 36, "f": 2, "g": 12}
    addresses = {"a": 320, "b": 256, "c": 192, "d": 240, "e": 128, "f": 164, "g": 166}
    allocator = CachingAllocator()
    for name, size in segments.items():
        allocator.malloc(name, size * MIB if size > 2 else 512)
    base = address_of(allocator, "e") - addresses["e"] * MIB
    assert {name: (address_of(allocator, name) - base) // MIB for name in segments} == addresses


def test_of_free_blocks_of_equal_size_the_lowest_is_taken():
    allocator = CachingAllocator()
    for name in ("old", "new"):
        allocator.malloc(name, 32 * MIB)
    lowest = address_of(allocator, "new")
    for name in ("new", "old"):
        allocator.free(name)
    allocator.malloc("next", 32 * MIB)
    assert address_of(allocator, "next") == lowest


def events(seed, count, largest_power=26):
    """A random sequence of `(identity, size)` with `size=None` for a free."""
    chance = random.Random(seed)
    live, result = [], []
    for identity in range(count):
        if live and chance.random() < 0.45:
            result.append((live.pop(chance.randrange(len(live))), None))
        else:
            result.append((identity, int(2 ** chance.uniform(0, largest_power))))
            live.append(identity)
    return result


def replay(allocator, sequence):
    for identity, size in sequence:
        if size is not None:
            allocator.malloc(identity, size)
        else:
            allocator.free(identity)


def check_layout(allocator):
    spans = [(address, size) for _, address, size in allocator.blocks_in_use()]
    assert sum(size for _, size in spans) == allocator.allocated_bytes
    spans += allocator.cached_blocks()
    assert sum(size for _, size in spans) == allocator.reserved_bytes
    spans.sort()
    for (address, size), (following, _) in itertools.pairwise(spans):
        assert address + size <= following
    for pool in (allocator._small, allocator._large):
        for _, _, block in pool.blocks:
            assert block.next is None or not block.next.free  # neighbours are one block


REQUESTS = st.one_of(
    st.integers(0, 4096),
    st.integers(0, 80 * MIB),
    st.sampled_from([512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB]).flatmap(
        lambda size: st.sampled_from([size - 1, size, size + 1])  # where the rules change
    ),
)
"""Bytes of an allocation; `PROGRAMS` also have the index of a live one to free."""
FREES = st.integers(0, 1000).map(lambda index: ("free", index))
PROGRAMS = st.lists(st.one_of(REQUESTS.map(lambda size: ("malloc", size)), FREES), max_size=40)


@given(program=PROGRAMS)
def test_any_program_keeps_the_layout(program):
    allocator, live = CachingAllocator(), {}
    for position, (action, value) in enumerate(program):
        if action == "malloc":
            allocator.malloc(position, value)
            live[position] = value
        elif live:
            identity = sorted(live)[value % len(live)]
            allocator.free(identity)
            del live[identity]
        check_layout(allocator)
        check_blocks(allocator, live)
    for identity in live:
        allocator.free(identity)
    check_layout(allocator)
    assert allocator.allocated_bytes == 0


def check_blocks(allocator, live):
    """Every live request has a block of its own, large enough, of whole 512 bytes."""
    held = {identity: (address, size) for identity, address, size in allocator.blocks_in_use()}
    assert set(held) == {identity for identity, size in live.items() if size}
    assert all(size >= live[identity] for identity, (_, size) in held.items())
    assert all(address % 512 == size % 512 == 0 for address, size in held.values())
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(3))
def test_a_real_device_agrees_after_every_event(seed):
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    if (allocated, reserved) != (0, 0):
        pytest.skip("something else in this process holds CUDA memory")
    known = set()

    def place(size_bytes):
        """Where the driver has put the segment that the real allocator has just taken, which decides ties."""
        new = [(one["address"], one["total_size"]) for one in torch.cuda.memory_snapshot()]
        ((address, size),) = [segment for segment in new if segment[0] not in known]
        known.add(address)
        assert size == size_bytes
        return address

    allocator, tensors = CachingAllocator(place=place), {}
    for identity, size in events(seed, 3000):
        if size is None:
            del tensors[identity]
        else:
            tensors[identity] = torch.empty(size, dtype=torch.uint8, device="cuda")
        replay(allocator, [(identity, size)])
        assert torch.cuda.memory_allocated() == allocator.allocated_bytes
        assert torch.cuda.memory_reserved() == allocator.reserved_bytes
