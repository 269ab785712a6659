import math

import pytest

from lightning_memfit.fitting.size.sizes import STEPS_BEFORE_GROWTH, MicroBatchSize, prefer


@pytest.mark.parametrize("local_batch_size", [1, 7, 16, 60, 64, 96, 500, 1000])
def test_preferred_sizes_cost_nothing(local_batch_size: int) -> None:
    for largest in range(1, local_batch_size + 10):
        size = prefer(local_batch_size, largest)
        assert 1 <= size <= min(largest, local_batch_size)
        assert math.ceil(local_batch_size / size) == math.ceil(local_batch_size / min(largest, local_batch_size))


def test_divisors_come_before_multiples_of_eight() -> None:
    assert prefer(64, 60) == 32
    assert prefer(60, 31) == 30
    assert prefer(1000, 470) == 334 or 1000 % prefer(1000, 470) == 0 or prefer(1000, 470) % 8 == 0
    assert prefer(5000, 450) == 448
    with pytest.raises(ValueError, match="`largest=0`"):
        prefer(4, 0)


def test_shrinking_always_ends() -> None:
    for local_batch_size in range(1, 200):
        sizes = MicroBatchSize(local_batch_size, local_batch_size)
        steps = 0
        while sizes.shrink(sizes.current):
            steps += 1
        assert sizes.current == 1
        assert steps < 30


def test_growth_after_a_quiet_spell_and_backoff_after_failures() -> None:
    sizes = MicroBatchSize(64, 64)
    assert sizes.shrink(64) == 32
    quiet = 0
    while sizes.succeed() == 32:
        quiet += 1
    assert quiet == 2 * STEPS_BEFORE_GROWTH - 1
    assert 32 < sizes.current <= 64
    for _ in range(10_000):
        sizes.succeed()
    assert sizes.current == 64
