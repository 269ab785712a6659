import random

import pytest

from lightning_memfit.fitting.size.search import Probe, SizeSearchResult, find_largest, largest_under, line_through


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


def test_a_wrong_prediction_ends_below_what_failed() -> None:
    tried = []

    def fail(size: int) -> Probe:
        tried.append(size)
        return Probe(size, False)

    found = find_largest(100, lambda n: n, 80, fail)
    assert tried == [80, 78]
    assert found == SizeSearchResult(58, False, 58, (Probe(80, False), Probe(78, False)))


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


def test_line_through_keeps_the_steps_peak() -> None:
    line = line_through(Probe(1, True, 100, 40), Probe(11, True, 100, 60))
    assert [line(n) for n in (1, 11, 31, 41)] == [100, 100, 100, 120]
    with pytest.raises(ValueError, match="measured trials"):
        line_through(Probe(1, False), Probe(2, True, 1, 1))
