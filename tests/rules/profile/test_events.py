from dataclasses import replace

import numpy as np
import pytest

from lightning_memfit.memory import Category
from lightning_memfit.profile.events import (
    BOUNDED_SCRATCH_SITE,
    CATEGORIES,
    OUTSIDE,
    SCRATCH_SITE,
    AlignmentError,
    EventList,
    at_size,
    canonical,
    fit_sizes,
    fit_slopes,
)


def events_of(signed, sizes, blocks=None, categories=None, phases=()):
    categories = categories or [Category.ACTIVATION] * len(sizes)
    return EventList(
        events=np.array(signed, dtype=np.int64),
        event_blocks=np.array(blocks or [OUTSIDE] * len(signed), dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        categories=np.array([CATEGORIES.index(category) for category in categories], dtype=np.int64),
        sites=np.arange(len(sizes)),
        site_names=tuple(f"site {number}" for number in range(len(sizes))),
        phases=phases,
    )


# storage 0 stays; 1 and 2 overlap; 3 comes after both
HAND_MADE = events_of(
    [1, 2, 3, -2, -3, 4, -4],
    [100, 10, 1000, 7],
    categories=[Category.PARAMETER, Category.ACTIVATION, Category.ACTIVATION, Category.TEMPORARY],
    phases=((1, "forward"), (3, "backward"), (5, "step")),
)


def test_live_bytes_follow_every_event():
    assert HAND_MADE.live_bytes().tolist() == [100, 110, 1110, 1100, 100, 107, 100]
    assert HAND_MADE.live_bytes(512).tolist() == [512, 1024, 2048, 1536, 512, 1024, 512]  # storage by storage


def test_breakdown_adds_up_to_the_live_bytes():
    breakdown = HAND_MADE.breakdown_at(2)
    assert breakdown.get(Category.PARAMETER) == 100
    assert breakdown.get(Category.ACTIVATION) == 1010
    assert breakdown.get(Category.TEMPORARY) == 0
    assert breakdown.total() == HAND_MADE.live_bytes()[2]
    assert HAND_MADE.breakdown_at(2, rounding_bytes=512).total() == HAND_MADE.live_bytes(512)[2]


def test_largest_names_site_category_and_bytes():
    assert HAND_MADE.largest_at(2, count=2) == [
        ("site 2", Category.ACTIVATION, 1000),
        ("site 0", Category.PARAMETER, 100),
    ]
    assert len(HAND_MADE.largest_at(2, count=50)) == 3


def test_phase_of_every_event():
    names = [HAND_MADE.phase_at(index) for index in range(len(HAND_MADE))]
    assert names == ["setup", "forward", "forward", "backward", "backward", "step", "step"]


def test_canonical_order_ignores_the_order_of_frees_only():
    a = events_of([1, 2, 3, -1, -3, -2, 4], [1, 2, 3, 4])
    b = events_of([1, 2, 3, -2, -1, -3, 4], [1, 2, 3, 4])
    assert canonical(a).events.tolist() == canonical(b).events.tolist()
    earlier = events_of([1, 2, -1, 3, -2, -3, 4], [1, 2, 3, 4])
    assert canonical(earlier).events.tolist() != canonical(a).events.tolist()


def test_canonical_keeps_blocks_with_their_events():
    a = events_of([1, 2, -1, -2], [1, 2], blocks=[1, 0, 1, 0])
    assert canonical(a).events.tolist() == [1, 2, -2, -1]
    assert canonical(a).event_blocks.tolist() == [1, 0, 0, 1]


def test_slopes_give_every_size_from_two():
    def at(batch):
        return events_of([1, 2, -2, -1], [50, 3 + 8 * batch])

    events, slopes = fit_slopes(at(2), at(3), 2, 3)
    assert slopes.tolist() == [0, 8]
    for batch in (1, 2, 7, 32):
        assert at_size(events, slopes, 2, batch).sizes.tolist() == at(batch).sizes.tolist()


@pytest.mark.parametrize(
    ("size_of", "traces"),
    [
        (lambda batch: 48 + 3 * batch, 2),
        (lambda batch: 50 + 3 * batch, 3),
        (lambda batch: 4 * (batch + 16) ** 2, 4),
        (lambda batch: 8 * (batch - 1), 3),
        (lambda batch: 4 * batch**2, 4),
        (lambda batch: 2 * batch * (batch - 1), 4),
        (lambda batch: 4 * batch**3 + batch**2, 5),
    ],
)
def test_storages_that_grow_with_a_power_of_the_batch_are_followed(size_of, traces):
    asked = {2}

    def at(batch):
        asked.add(batch)
        return events_of([1, 2, -2, -1], [50 + batch, size_of(batch)])

    events, slopes = fit_sizes(at(2), lambda more: at(2 + more), 2)
    assert asked == set(range(2, 2 + traces))
    for batch in (1, 2, 7, 512):
        assert at_size(events, slopes, 2, batch).sizes.tolist() == at(batch).sizes.tolist()


def test_sizes_that_a_kernel_rounds_to_pages_follow_a_line_above_them():
    """Results of oneDNN's recurrent layers: an LSTM's step was known at the traced size only."""

    def at(batch):
        return events_of([1, 2, -2, -1], [50 * batch, -(-(300_000 + 102_000 * batch) // 4096) * 4096])

    events, slopes = fit_sizes(at(2), lambda more: at(2 + more), 2)
    for batch in (1, 4, 16, 100):
        fitted, true = at_size(events, slopes, 2, batch).sizes, at(batch).sizes
        assert fitted[0] == true[0]
        assert abs(fitted[1] / true[1] - 1) < 0.01


def test_what_grows_by_no_rule_is_refused():
    with pytest.raises(AlignmentError, match="grow faster than the micro-batch.*sizes 2 to 6"):
        fit_sizes(events_of([1, -1], [2**2]), lambda more: events_of([1, -1], [2 ** (2 + 4 * more)]), 2)


def test_the_replayed_peak_need_not_be_affine():
    """One moment holds much at any size, another grows: the peak moves from one to the other."""

    def at(batch):
        return events_of([1, -1, 2, -2], [100, 10 * batch])

    events, slopes = fit_slopes(at(2), at(3), 2, 3)
    assert [at_size(events, slopes, 2, size).live_bytes().max() for size in (1, 5, 20)] == [100, 100, 200]
    with pytest.raises(ValueError, match="micro_batch_size=1000000000000000000000`.*more than 4 EiB"):
        at_size(events, slopes, 2, 10**21)
    assert at_size(events, slopes, 2, 10**16).live_bytes().max() == pytest.approx(10 * 10**16)


def test_scratch_that_has_a_bound_does_not_grow_with_the_batch():
    two, three = (events_of([1, 2, -2, -1], [10 * size, 30 * size]) for size in (2, 3))
    names = {"site_names": ("layer | op", f"layer | {BOUNDED_SCRATCH_SITE}"), "sites": np.array([0, 1])}
    events, slopes = fit_slopes(replace(two, **names), replace(three, **names), 2, 3)
    assert at_size(events, slopes, 2, 32).sizes.tolist() == [320, 90]


def test_what_a_phase_frees_stays_behind_its_start():
    """Backward frees 100 of 111 bytes, the step 1 of the rest: its peak is 10, whatever the order of the storages."""
    trace = events_of([1, 2, 3, -3, -1, -2], [1, 10, 100], phases=((0, "forward"), (3, "backward"), (4, "step")))
    ordered = canonical(trace)
    assert ordered.live_bytes()[4:].max() == trace.live_bytes()[4:].max() == 10
    assert ordered.live_bytes()[3] == 11


def with_scratch(signed, sizes, scratch, phases=()):
    """Events some of whose storages are scratch memory of kernels."""
    trace = events_of(signed, sizes, phases=phases)
    names = ("site", f"block | {SCRATCH_SITE}")
    return replace(trace, sites=np.array([int(number in scratch) for number in range(len(sizes))]), site_names=names)


def test_kernels_that_take_other_paths_at_other_sizes_leave_traces_aligned():
    two = with_scratch([1, 2, -2, 3, -3, 4, -4, -1], [100, 7, 9, 50], {1, 2}, ((5, "backward"),))
    none = with_scratch([1, 2, -2, -1], [200, 60], set(), ((1, "backward"),))
    at_end = with_scratch([1, 2, -2, -1, 3, -3], [300, 70, 5], {2}, ((1, "backward"),))
    events, slopes = fit_slopes(two, none, 1, 2)
    assert events.events.tolist() == canonical(events).events.tolist()
    assert events.live_bytes().tolist() == [100, 109, 100, 150, 50, 0]
    assert at_size(events, slopes, 1, 2).live_bytes().tolist() == [200, 200, 200, 260, 60, 0]
    assert events.phases == ((3, "backward"),)
    events, slopes = fit_slopes(none, at_end, 2, 3)
    assert at_size(events, slopes, 2, 3).live_bytes().tolist() == [300, 370, 70, 0, 5, 0]
    assert at_size(events, slopes, 2, 2).live_bytes().max() == none.live_bytes().max()


def test_so_are_traces_of_which_a_further_one_takes_another_path():
    """Of CLIP's only the size that was traced was known."""

    def at(batch):
        return with_scratch([1, 2, -2, -1] if batch == 4 else [1, -1], [batch**2, 64][: 1 + (batch == 4)], {1})

    events, slopes = fit_sizes(at(2), lambda more: at(2 + more), 2)
    assert at_size(events, slopes, 2, 9).live_bytes().max() == 81


def test_traces_that_differ_in_more_than_scratch_memory_are_not_aligned():
    first = with_scratch([1, 2, -2, -1], [100, 7], {1})
    second = with_scratch([1, -1, 2, -2], [100, 7], set())
    with pytest.raises(AlignmentError):
        fit_slopes(first, second, 1, 2)
