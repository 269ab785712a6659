import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.fitting.size.sizes import MicroBatchSize, prefer


@pytest.mark.parametrize("local_batch_size", [1, 7, 16, 60, 64, 96, 500, 1000])
def test_preferred_sizes_cost_nothing(local_batch_size: int) -> None:
    for largest in range(1, local_batch_size + 10):
        size = prefer(local_batch_size, largest)
        assert 1 <= size <= min(largest, local_batch_size)
        assert math.ceil(local_batch_size / size) == math.ceil(local_batch_size / min(largest, local_batch_size))


@given(local=st.integers(2, 4096), share=st.floats(0.01, 1.0), needs=st.floats(0.0, 1.0))
def test_what_failed_is_lowered_to_what_fits_and_no_further_than_half(local: int, share: float, needs: float) -> None:
    target = max(1, int(local * share))
    fitting = max(1, int(target * needs))
    sizes = MicroBatchSize(local, target)
    while sizes.current > fitting:
        assert sizes.shrink(sizes.current) > 0
    assert fitting / 3 <= sizes.current <= fitting


def test_larger_batches_run_whole_until_something_fails() -> None:
    sizes = MicroBatchSize(64)
    sizes.begin(64, 1000)
    assert [sizes.for_batch(number) for number in (10, 64, 100)] == [10, 64, 100]
    assert sizes.shrink(100) == 64
    assert sizes.for_batch(100) == 64
    assert sizes.shrink(64) == 32
    assert [sizes.for_batch(number) for number in (10, 64)] == [10, 32]
