import math
import random
import weakref
from collections.abc import Callable

import pytest

from lightning_memfit.fitting.size.search import (
    SizeSearch,
    StepMemory,
    largest_by_exact,
    largest_under,
)
from lightning_memfit.fitting.size.shapes import NoPrediction
from lightning_memfit.profile.quiet import collector_paused


class Device:
    """A memory curve with a limit: the largest of a few lines, like the phases of a step."""

    def __init__(self, rng: random.Random, largest: int) -> None:
        constant = rng.uniform(0, 5e6)
        self.lines = [(constant + rng.uniform(0, 2e5), rng.uniform(1e3, 1e5)) for _ in range(rng.randint(1, 3))]
        self.limit = (self.peak(largest) + self.peak(largest + 1)) // 2

    def peak(self, size: int) -> int:
        return round(max(offset + slope * size for offset, slope in self.lines))


class Exact:
    """A traced prediction."""

    def __init__(self, peak: Callable[[int], int]) -> None:
        self.peak = peak

    def __call__(self, size: int) -> int:
        return self.peak(size)

    def calibrate(self, live_bytes: int, is_after_step: bool) -> None:
        pass

    def largest_under(self, limit_bytes: int, upper: int) -> int:
        return largest_under(self.peak, limit_bytes, upper)


def train(search: SizeSearch, peak: Callable[[int], int], limit: int, rest: int = 0, flat: int = 0) -> list[int]:
    """Run steps until the search has ended; the sizes that were tried, those that failed as well.

    Args:
        search: The search.
        peak: What forward and backward take at a size.
        limit: The memory.
        rest: Bytes alive between steps.
        flat: What the optimizer step takes.
    """
    tried, size = [], search.first(rest)
    while not search.is_done:
        tried.append(size)
        has_failed = False
        while max(peak(size), flat) > limit:
            has_failed = True
            if size == 1:
                return tried
            size = search.fail(size)
            tried.append(size)
        size = search.after(StepMemory(size, max(peak(size), flat), peak(size), rest, not has_failed))
    return tried


@pytest.mark.parametrize("seed", range(200))
def test_the_maximum_is_found(seed: int) -> None:
    """Prediction wrong by up to 2 MB in its constant and 3 % in its slope, as measured peaks are; never 1 % too low."""
    rng = random.Random(seed)
    largest = rng.randint(1, 500)
    device = Device(rng, largest)
    shift, factor = rng.uniform(-2e6, 2e6), rng.uniform(0.99, 1.03)

    def predict(size: int) -> int:
        return round((device.peak(size) - device.peak(1)) * factor + shift)

    search = SizeSearch(600, device.limit, Exact(predict), can_fail=True)
    tried = train(search, device.peak, device.limit)
    assert search.is_done
    best = search.tried
    assert 1 <= best <= largest
    assert -(-600 // best) <= -(-600 // max(1, int(0.97 * largest))) or best >= largest - 1
    assert len(tried) <= 10


@pytest.mark.parametrize("true", [1, 2, 30, 57, 77, 78, 79])
def test_a_wrong_prediction_ends_with_a_size_that_was_tried(true: int) -> None:
    search = SizeSearch(100, 80, Exact(lambda n: n), can_fail=True, is_measured=False)
    tried = train(search, lambda n: n, true)
    assert tried[:2] == [80, 78]
    assert search.tried in tried
    assert true / 2 <= search.tried <= true
    assert len(tried) <= 8


def test_nothing_fits() -> None:
    search = SizeSearch(100, 80, Exact(lambda n: n), can_fail=True)
    assert train(search, lambda n: 81, 80)[-1] == 1
    assert not search.tried


def test_the_whole_share_is_tried_at_once() -> None:
    device = Device(random.Random(0), 400)
    search = SizeSearch(64, device.limit, Exact(device.peak), can_fail=True)
    assert train(search, device.peak, device.limit) == [64, 64]


# --- curves that are not lines --------------------------------------------------------------------------------------

CURVES: dict[str, Callable[[int], int]] = {
    "line": lambda n: 5_000 * n + 90_000,
    "attention over the batch": lambda n: 40 * n * n + 900 * n,
    "distances": lambda n: 12 * n * n + 1,
    "power": lambda n: round(3_000 * n**1.4),
    "jump": lambda n: 2_000 * n + 300_000 * (n > 60),
}
STEPPED: dict[str, Callable[[int], int]] = {
    "padded to 16": lambda n: 70_000 * -(-n // 16),
    "padded to 32, squared": lambda n: (-(-n // 32)) ** 2 * 50_000 + 90 * n,
    "padded to a power of two": lambda n: 9_000 * 2 ** math.ceil(math.log2(n)),
}
REST = 400_000


class Curve:
    """A prediction that is right, and counts what was asked."""

    def __init__(self, work: Callable[[int], int], true: int) -> None:
        while work(true + 1) <= work(true):
            true += 1
        self.true = true
        self._work = work
        self.limit = (self(true) + self(true + 1)) // 2
        self.asked: list[int] = []

    def __call__(self, size: int) -> int:
        return REST + self._work(size)

    def exact(self, size: int) -> int:
        self.asked.append(size)
        return self(size)

    def calibrate(self, live_bytes: int, is_after_step: bool) -> None:
        """Nothing to correct."""

    def largest_under(self, limit_bytes: int, upper: int) -> int:
        known = {2: self(2), 3: self(3)}
        return largest_by_exact(
            self.exact, limit_bytes, upper, known, lambda n: self(2) + (self(3) - self(2)) * (n - 2)
        )


def is_near(found: int, true: int) -> bool:
    return min(0.97 * true, true - 1) <= found <= true


@pytest.mark.parametrize("true", [1, 2, 3, 7, 30, 127, 400])
@pytest.mark.parametrize("name", [*CURVES, *STEPPED])
def test_a_traced_prediction_of_any_curve_is_right_at_once(name: str, true: int) -> None:
    curve = Curve((CURVES | STEPPED)[name], true)
    search = SizeSearch(1024, curve.limit, curve, can_fail=True)
    tried = train(search, curve, curve.limit, REST)
    assert is_near(search.largest, min(curve.true, 1024))
    assert set(tried) == {search.tried}
    assert len(tried) == 2
    assert len(set(curve.asked)) <= 20


def test_a_traced_prediction_that_is_wrong_is_corrected_by_what_was_measured() -> None:
    """3 % too low, so that the first size fails; 40 % too high, so that the second step promises more."""
    curve = Curve(CURVES["distances"], 300)
    for factor, wanted in ((0.97, 0.95), (1.4, 0.9)):
        wrong = Curve(lambda n, f=factor: round(f * CURVES["distances"](n)), 300)  # type: ignore[misc]
        search = SizeSearch(1024, curve.limit, wrong, can_fail=True)
        tried = train(search, curve, curve.limit, REST)
        assert wanted * 300 <= search.tried <= 300
        assert len(set(tried)) <= 3


def test_no_prediction_on_one_rank_is_none_on_all() -> None:
    search = SizeSearch(64, 80, Exact(lambda n: n), can_fail=True, agree=lambda size: -1)
    assert search.first() == 2
    assert "another rank" in search.no_prediction
    assert not search.is_predicted


def test_ranks_take_the_size_that_all_of_them_predict() -> None:
    assert SizeSearch(64, 50, Exact(lambda n: n), can_fail=True, agree=lambda n: min(n, 40)).first() == 40


# --- without a prediction -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [1, 2, 3, 7, 30, 127, 400])
@pytest.mark.parametrize("name", [name for name in CURVES if name != "jump"])
def test_a_smooth_curve_is_found_in_seven_steps(name: str, true: int) -> None:
    curve = Curve(CURVES[name], true)
    search = SizeSearch(1024, curve.limit, None, can_fail=True)
    tried = train(search, curve, curve.limit, REST)
    assert is_near(search.tried, true)
    assert len(tried) <= 9
    assert sum(size > true for size in tried) <= 1


@pytest.mark.parametrize("true", [16, 30, 64, 127, 400])
@pytest.mark.parametrize("name", [*STEPPED, "jump"])
def test_steps_end_with_a_size_that_was_tried_and_fits(name: str, true: int) -> None:
    curve = Curve((CURVES | STEPPED)[name], true)
    search = SizeSearch(1024, curve.limit, None, can_fail=True)
    tried = train(search, curve, curve.limit, REST)
    assert 1 <= search.tried <= curve.true
    assert search.tried in tried
    assert len(tried) <= 11


@pytest.mark.parametrize("upper", [1, 6, 64])
def test_a_share_that_fits_is_tried_whole(upper: int) -> None:
    curve = Curve(CURVES["line"], 900)
    search = SizeSearch(upper, curve.limit, None, can_fail=True)
    train(search, curve, curve.limit, REST)
    assert search.tried == upper


@pytest.mark.parametrize("name", ["none", "exact", "too low"])
@pytest.mark.parametrize("true", [3, 30, 400])
def test_where_a_failure_ends_the_run_none_happens(name: str, true: int) -> None:
    """The limit is left alone, however wrong the prediction's constant is."""
    curve = Curve(CURVES["line"], true)
    predict = {"none": None, "exact": curve, "too low": Curve(lambda n: CURVES["line"](n) - 80_000, true)}[name]
    search = SizeSearch(1024, curve.limit, predict, can_fail=False)
    tried = train(search, curve, curve.limit, REST)
    assert max(tried) <= true
    assert search.tried >= min(0.85 * true, true - 2)


def test_a_refused_trace_leaves_nothing_alive() -> None:
    """An error that a frame of its own traceback names holds that frame, and what is in it, until a collection."""
    alive: list[weakref.ref[object]] = []

    class Unpredictable:
        def __call__(self, size: int) -> int:
            return size

        def calibrate(self, live_bytes: int, is_after_step: bool) -> None:
            pass

        def largest_under(self, limit_bytes: int, upper: int) -> int:
            batch = Unpredictable()
            alive.append(weakref.ref(batch))
            try:
                raise ValueError("values")
            except ValueError as error:
                cycle = [error]  # noqa: F841
                raise NoPrediction("values") from error

    with collector_paused():
        search = SizeSearch(8, 100, Unpredictable(), can_fail=True)
        search.first()
        assert search.no_prediction == "values"
        assert alive[0]() is None


@pytest.mark.parametrize("room", [0, 5, 20, 100, 500])
def test_a_measured_flat_curve_is_flat(room: int) -> None:
    """The optimizer step takes 1,000 bytes at any size, and not more with the samples as predicted."""
    search = SizeSearch(48, 1000 + room, Exact(lambda n: 1000 + 10 * n), can_fail=True)
    tried = train(search, lambda n: 600 + 2 * n, 1000 + room, 500, flat=1000)
    assert search.tried == 48
    assert len(set(tried)) <= 3


def test_a_module_that_cannot_run_few_samples_begins_with_more() -> None:
    search = SizeSearch(20, 3200, None, can_fail=True)
    assert search.first(0) == 2
    assert [search.needs_more(size) for size in (2, 4, 8, 16, 20)] == [4, 8, 16, 20, 0]
