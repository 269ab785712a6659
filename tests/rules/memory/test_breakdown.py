"""Breakdowns add up like vectors of bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.memory import Category, MemoryBreakdown, Tier, pinned_block_bytes

SIZES = st.integers(0, 1 << 45)
KEYS = st.tuples(st.sampled_from(Tier), st.sampled_from(Category))
BREAKDOWNS = st.dictionaries(KEYS, SIZES, max_size=12).map(MemoryBreakdown)


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1, 1), (3, 4), (4, 4), (5, 8), (11008 * 4096 * 2, 1 << 27)])
def test_torch_locks_powers_of_two(size, block):
    assert pinned_block_bytes(size) == block
    pinned = MemoryBreakdown.pinned(Category.TEMPORARY, [size, 4, size])
    assert pinned.get(Category.TEMPORARY, Tier.PINNED_HOST) == 2 * size + 4
    assert pinned.total(Tier.PINNED_HOST) == 2 * block + 4


@given(BREAKDOWNS, BREAKDOWNS, BREAKDOWNS)
def test_addition_commutes_and_associates_and_has_a_zero(a, b, c):
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + MemoryBreakdown() == a


@given(BREAKDOWNS, BREAKDOWNS)
def test_totals_and_entries_add_up(a, b):
    for tier in Tier:
        assert (a + b).total(tier) == a.total(tier) + b.total(tier) == sum((a + b).by_category(tier).values())
        for category in Category:
            assert (a + b).get(category, tier) == a.get(category, tier) + b.get(category, tier)


@given(BREAKDOWNS, KEYS, SIZES)
def test_replacing_sets_one_entry_of_a_copy(breakdown, key, size):
    tier, category = key
    before = dict(breakdown.entries)
    changed = breakdown.replace(category, size, tier)
    assert changed.get(category, tier) == size
    assert changed.total(tier) == breakdown.total(tier) - breakdown.get(category, tier) + size
    assert {k: v for k, v in changed.entries.items() if k != key} == {k: v for k, v in before.items() if k != key}
    assert breakdown.entries == before
    assert changed.replace(category, breakdown.get(category, tier), tier) == breakdown


@given(BREAKDOWNS)
def test_a_breakdown_is_what_its_rows_and_its_json_say(breakdown):
    assert MemoryBreakdown({(tier, category): size for tier, category, size in breakdown}) == breakdown
    assert MemoryBreakdown.from_dict(json.loads(json.dumps(breakdown.to_dict()))) == breakdown
    assert all(size > 0 for *_, size in breakdown)


@given(st.dictionaries(st.sampled_from(Category), SIZES), st.sampled_from(Tier))
def test_bytes_of_one_tier(by_category, tier):
    breakdown = MemoryBreakdown.on(tier, by_category)
    assert breakdown.by_category(tier) == {category: size for category, size in by_category.items() if size}
    assert [breakdown.total(other) for other in Tier if other is not tier] == [0] * (len(Tier) - 1)
    assert MemoryBreakdown.device(by_category).by_category() == breakdown.by_category(tier)


@given(KEYS, st.integers(max_value=-1))
def test_negative_bytes_are_refused(key, size):
    with pytest.raises(ValueError, match="is negative"):
        MemoryBreakdown({key: size})
