import pytest

from lightning_memfit.device.runtime import runtime_memory
from lightning_memfit.estimate.estimate import estimate_step, predict_total_bytes
from lightning_memfit.estimate.report import MAX_MICRO_BATCH, Verdict, judge, largest_micro_batch
from lightning_memfit.estimate.target import Target
from lightning_memfit.memory import GIB, MIB
from tests.rules.estimate.steps import GRADIENT, SAMPLE, STATE, WEIGHT, step_profile


@pytest.mark.nightly
def test_largest_micro_batch_is_the_largest_that_a_scan_finds():
    profile, runtime = step_profile(), runtime_memory((8, 6))
    for usable in range(600 * MIB, 2000 * MIB, 37 * MIB):
        found = largest_micro_batch(profile, usable, runtime)
        scanned = [size for size in range(1, 600) if predict_total_bytes(profile, size, runtime) <= usable]
        assert found == max(scanned, default=0)


def test_none_fits_and_everything_fits():
    profile = step_profile()
    assert largest_micro_batch(profile, 100 * MIB) == 0
    assert largest_micro_batch(profile, 1 << 60) == MAX_MICRO_BATCH


def test_on_the_cpu_nothing_is_cached():
    states = WEIGHT + GRADIENT + STATE
    assert largest_micro_batch(step_profile(device="cpu"), states + 20 * SAMPLE) == 20
    assert largest_micro_batch(step_profile(device="cpu"), states + 20 * SAMPLE - 1) == 19


def test_profile_of_one_size_is_refused():
    with pytest.raises(ValueError, match="known at 4 only"):
        largest_micro_batch(step_profile(any_size=False), GIB)


def test_total_agrees_with_the_estimate():
    profile, runtime = step_profile(), runtime_memory((8, 6))
    for size in (1, 4, 50):
        assert predict_total_bytes(profile, size, runtime) == estimate_step(profile, size, runtime).total_bytes


@pytest.mark.parametrize(("usable", "fits", "code"), [(None, None, 2), (100, True, 0), (99, False, 1)])
def test_verdict(usable, fits, code):
    verdict = Verdict(100, usable)
    assert verdict.fits is fits
    assert verdict.exit_code == code


def test_margin_is_left_free():
    estimate = estimate_step(step_profile())
    exact = Target("card", "cuda", estimate.total_bytes + MIB, margin_bytes=MIB)
    assert judge(estimate, exact).fits
    assert not judge(estimate, Target("card", "cuda", estimate.total_bytes + MIB, margin_bytes=MIB + 1)).fits
