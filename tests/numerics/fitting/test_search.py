import math
import random
import weakref
from collections.abc import Callable

import pytest

from lightning_memfit.fitting.size.search import (
    NoPrediction,
    Probe,
    find_by_trials,
    find_largest,
    largest_by_exact,
    largest_under,
)
from lightning_memfit.profile.quiet import collector_paused


class Device:
    """A memory curve with a limit: the largest of a few lines, like the phases of a step."""

    def __init__(self, rng: random.Random, largest: int) -> None:
        constant = rng.uniform(0, 5e6)
        self.lines = [(constant + rng.uniform(0, 2e5), rng.uniform(1e3, 1e5)) for _ in range(rng.randint(1, 3))]
        self.limit = (self.peak(largest) + self.peak(largest + 1)) // 2
        self.probes: list[Probe] = []

    def peak(self, size: int) -> int:
        return round(max(offset + slope * size for offset, slope in self.lines))

    def probe(self, size: int) -> Probe:
        fits = self.peak(size) <= self.limit
        self.probes.append(Probe(size, fits, self.peak(size) if fits else None, self.peak(size) if fits else None))
        return self.probes[-1]


@pytest.mark.parametrize("seed", range(200))
def test_the_maximum_is_found(seed: int) -> None:
    """Prediction wrong by up to 2 MB in its constant and 3 % in its slope, as measured peaks are; never 1 % too low."""
    rng = random.Random(seed)
    largest = rng.randint(1, 500)
    device = Device(rng, largest)
    shift, factor = rng.uniform(-2e6, 2e6), rng.uniform(0.99, 1.03)
    first = Probe(1, True, device.peak(1), device.peak(1))
    found = find_largest(
        600, lambda n: round((device.peak(n) - device.peak(1)) * factor + shift), device.limit, device.probe, first
    )
    assert len(device.probes) <= 2
    assert sum(not probe.fits for probe in device.probes) <= 1
    assert found.largest <= largest
    assert found.largest >= min(0.97 * largest, largest - 1)
    assert found.is_verified


@pytest.mark.parametrize("true", [1, 2, 30, 57, 77, 78, 79])
def test_a_wrong_prediction_ends_with_a_size_that_was_tried(true: int) -> None:
    tried = []

    def probe(size: int) -> Probe:
        tried.append(size)
        return Probe(size, size <= true)

    found = find_largest(100, lambda n: n, 80, probe)
    assert tried[:2] == [80, 78]
    assert found.largest in tried
    assert found.is_verified
    assert found.largest <= true
    assert len(tried) <= 8


def test_nothing_fits() -> None:
    found = find_largest(100, lambda n: n, 80, lambda size: Probe(size, False))
    assert (found.largest, found.is_verified, found.probes[-1]) == (0, False, Probe(1, False))


def test_the_whole_share_needs_one_probe() -> None:
    device = Device(random.Random(0), 400)
    found = find_largest(64, device.peak, device.limit, device.probe)
    assert found.largest == 64
    assert [probe.size for probe in device.probes] == [64]


def test_without_measured_peaks_one_good_probe_ends_the_search() -> None:
    found = find_largest(100, lambda n: n, 50, lambda size: Probe(size, True))
    assert (found.largest, len(found.probes), found.is_verified) == (50, 1, True)


def test_largest_under() -> None:
    for limit in range(0, 130, 7):
        assert largest_under(lambda n: 3 * n, limit, 40) == min(limit // 3, 40)


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
        self.tried: list[int] = []

    def __call__(self, size: int) -> int:
        return REST + self._work(size)

    def exact(self, size: int) -> int:
        self.asked.append(size)
        return self(size)

    def calibrate(self, rest_bytes: int) -> None:
        """Nothing to correct."""

    def largest_under(self, limit_bytes: int, upper: int) -> int:
        known = {2: self(2), 3: self(3)}
        return largest_by_exact(
            self.exact, limit_bytes, upper, known, lambda n: self(2) + (self(3) - self(2)) * (n - 2)
        )

    def probe(self, size: int) -> Probe:
        self.tried.append(size)
        fits = self(size) <= self.limit
        return Probe(size, fits, self(size) if fits else None, self(size) if fits else None)


def is_near(found: int, true: int) -> bool:
    return min(0.97 * true, true - 1) <= found <= true


@pytest.mark.parametrize("true", [1, 2, 3, 7, 30, 127, 400])
@pytest.mark.parametrize("name", [*CURVES, *STEPPED])
def test_a_traced_prediction_of_any_curve_needs_one_trial(name: str, true: int) -> None:
    curve = Curve((CURVES | STEPPED)[name], true)
    found = find_largest(1024, curve, curve.limit, curve.probe)
    assert is_near(found.largest, min(curve.true, 1024))
    assert curve.tried == [found.largest]
    assert found.is_verified
    assert len(set(curve.asked)) <= 20


def test_a_straight_line_is_traced_at_one_size_more() -> None:
    curve = Curve(CURVES["line"], 200)
    assert curve.largest_under(curve.limit, 1024) == 200
    assert curve.asked == [200]


def test_few_values_are_asked_for_however_little_they_say() -> None:
    asked = []
    found = largest_by_exact(lambda n: asked.append(n) or n, 700, 10**9, {})  # type: ignore[func-returns-value]
    assert is_near(found, 700)
    assert len(asked) <= 20
    assert largest_by_exact(lambda n: n, 700, 1024, {500: 500}, is_out_of_time=lambda: True) == 500


def test_a_traced_prediction_that_is_wrong_is_corrected_by_what_was_measured() -> None:
    """3 % too low, so that the first trial fails; 40 % too high, so that the second promises more."""
    curve = Curve(CURVES["distances"], 300)
    for factor, wanted in ((0.97, 0.95), (1.4, 0.9)):
        curve.tried.clear()
        wrong = Curve(lambda n, f=factor: round(f * CURVES["distances"](n)), 300)  # type: ignore[misc]
        found = find_largest(1024, wrong, curve.limit, curve.probe)
        assert wanted * 300 <= found.largest <= 300
        assert found.largest in curve.tried
        assert len(curve.tried) == 2


def test_no_prediction_on_one_rank_is_none_on_all() -> None:
    with pytest.raises(NoPrediction, match="another rank"):
        find_largest(64, lambda n: n, 80, lambda size: Probe(size, True), agree=lambda size: -1)


def test_ranks_try_the_size_that_all_of_them_predict() -> None:
    tried = []
    find_largest(64, lambda n: n, 50, lambda n: tried.append(n) or Probe(n, True), agree=lambda n: min(n, 40))  # type: ignore[func-returns-value]
    assert tried == [40]


# --- trials alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [1, 2, 3, 7, 30, 127, 400])
@pytest.mark.parametrize("name", [name for name in CURVES if name != "jump"])
def test_a_smooth_curve_is_found_in_five_trials(name: str, true: int) -> None:
    curve = Curve(CURVES[name], true)
    found = find_by_trials(1024, REST, curve.limit, curve.probe)
    assert is_near(found.largest, true)
    assert found.largest in curve.tried
    assert len(curve.tried) <= 5
    assert sum(size > true for size in curve.tried) <= 1


@pytest.mark.parametrize("true", [16, 30, 64, 127, 400])
@pytest.mark.parametrize("name", [*STEPPED, "jump"])
def test_steps_end_with_a_size_that_was_tried_and_fits(name: str, true: int) -> None:
    curve = Curve((CURVES | STEPPED)[name], true)
    found = find_by_trials(1024, REST, curve.limit, curve.probe)
    assert 1 <= found.largest <= curve.true
    assert found.largest in curve.tried
    assert len(curve.tried) <= 6


def test_a_share_that_fits_is_tried_whole() -> None:
    curve = Curve(CURVES["line"], 900)
    assert find_by_trials(6, REST, curve.limit, curve.probe).largest == 6
    assert find_by_trials(1, REST, curve.limit, curve.probe).largest == 1
    assert find_by_trials(64, REST, curve.limit, curve.probe).largest == 64


def test_nothing_fits_beside_what_is_there() -> None:
    assert find_by_trials(64, REST, REST, lambda size: Probe(size, False)).largest == 0


def test_a_refused_trace_leaves_nothing_alive() -> None:
    """An error that a frame of its own traceback names holds that frame, and what is in it, until a collection."""
    alive: list[weakref.ref[object]] = []

    class Unpredictable:
        def __call__(self, size: int) -> int:
            return size

        def calibrate(self, rest_bytes: int) -> None:
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
        with pytest.raises(NoPrediction, match="values"):
            find_largest(8, Unpredictable(), 100, lambda size: Probe(size, True, size))
        assert alive[0]() is None


class TooSteep:
    """A traced prediction that lets the optimizer step grow with the samples, which it doesn't."""

    def __call__(self, size: int) -> int:
        return 1000 + 10 * size

    def calibrate(self, rest_bytes: int) -> None:
        pass

    def largest_under(self, limit_bytes: int, upper: int) -> int:
        return largest_under(self, limit_bytes, upper)


@pytest.mark.parametrize("room", [0, 5, 20, 100, 500])
def test_a_measured_flat_curve_is_flat(room: int) -> None:
    """The optimizer step takes 1,000 bytes at any size, forward and backward 600 and two for each sample."""
    found = find_largest(48, TooSteep(), 1000 + room, lambda size: Probe(size, True, 1000, 600 + 2 * size))
    assert found.largest == 48
    assert found.is_verified
    assert len(found.probes) <= 3


def test_trials_begin_with_the_fewest_samples_that_run() -> None:
    tried = []

    def probe(size: int) -> Probe:
        tried.append(size)
        return Probe(size, True, 100 * size, 100 * size)

    assert find_by_trials(64, 0, 3200, probe, least=8).largest >= 29
    assert tried[0] == 8
