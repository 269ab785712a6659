import math
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def run(sizes: MicroBatchSize, fits: Callable[[int, int], bool], num_steps: int) -> list[int]:
    """Train: the size with which each effective batch passed; one that fails is repeated with a smaller one."""
    passed = []
    for step in range(num_steps):
        while not fits(step, sizes.current):
            assert sizes.shrink(sizes.current) < sizes.target
        passed.append(sizes.current)
        sizes.succeed()
        assert sizes.current <= sizes.target
    return passed


def test_growth_after_a_quiet_spell() -> None:
    passed = run(MicroBatchSize(64, 64), lambda step, size: step > 0 or size <= 32, 300)
    assert passed == [32] * STEPS_BEFORE_GROWTH + [64] * (300 - STEPS_BEFORE_GROWTH)


@given(
    local=st.integers(1, 4096),
    share=st.floats(0.01, 1.0),
    needs=st.floats(0.0, 1.0),
    at=st.integers(0, 500),
)
def test_one_bad_batch_costs_two_hundred_quiet_steps_at_most(local: int, share: float, needs: float, at: int) -> None:
    target = max(1, int(local * share))
    fitting = max(1, int(target * needs))
    sizes = MicroBatchSize(local, target)
    passed = run(sizes, lambda step, size: step != at or size <= fitting, at + 1)
    assert passed[:at] == [target] * at
    assert passed[at] <= fitting
    assert run(sizes, lambda step, size: True, 200)[-1] == target
    run(sizes, lambda step, size: True, 200)
    assert sizes.succeed() == target


@pytest.mark.nightly
@given(
    local=st.integers(2, 512),
    fails=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 512)), max_size=12),
)
def test_it_is_never_above_the_target_and_comes_back_whatever_failed(local: int, fails: list[tuple[int, int]]) -> None:
    sizes = MicroBatchSize(local, local)
    for quiet, fitting in fails:
        run(sizes, lambda step, size, fitting=fitting: step > 0 or size <= fitting, 1)  # type: ignore[misc]
        run(sizes, lambda step, size: True, quiet)
    longest = STEPS_BEFORE_GROWTH * 2 ** (len(fails) + 1)
    assert run(sizes, lambda step, size: True, 12 * longest)[-1] == local


@pytest.mark.parametrize("fitting", [1, 8, 30, 40, 47, 63])
def test_a_lasting_shortage_costs_few_repeats_and_ends_at_what_fits(fitting: int) -> None:
    sizes, tried = MicroBatchSize(64, 64), []

    def fits(step: int, size: int) -> bool:
        if size > fitting:
            tried.append(step)
        return size <= fitting

    passed = run(sizes, fits, 20_000)
    assert len(tried) <= 5 + math.log2(20_000 / STEPS_BEFORE_GROWTH) + 5  # halvings of the first batch, then tries
    fewest = math.ceil(64 / fitting)
    assert math.ceil(64 / passed[-1]) <= fewest + (fewest > 2)
    assert math.ceil(64 / passed[2_500]) <= max(2 * fewest, 4)


def test_a_size_of_other_ranks_counts_as_ours() -> None:
    sizes = MicroBatchSize(64, 64)
    sizes.current = 16  # as all ranks do when one of them fails
    passed = run(sizes, lambda step, size: True, 200)
    assert passed[0] == 16
    assert passed[-1] == 64


def test_steps_at_the_target_have_nothing_to_do() -> None:
    sizes = MicroBatchSize(64, 64)
    run(sizes, lambda step, size: True, STEPS_BEFORE_GROWTH)
    before = pickle.dumps(sizes)
    assert sizes.succeed() == 64
    assert pickle.dumps(sizes) == before  # seconds would depend on the processor and on who else uses it
