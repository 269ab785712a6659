import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.checkpointing.knapsack import BlockOption, CheckpointingProblem, PlanFrontier
from lightning_memfit.checkpointing.policies import CHOICES


def equal_blocks(num_blocks):
    """Figures in the proportions of GPT-2, bytes in units of a hidden state."""
    rows = [
        ("none", 34_000, 50_000, 0.0),
        ("keep_matmul_attention", 12_000, 52_000, 0.6e-3),
        ("keep_matmul", 10_000, 53_000, 0.9e-3),
        ("keep_attention", 3_000, 54_000, 2.0e-3),
        ("full", 2_000, 55_000, 2.7e-3),
    ]
    options = tuple(BlockOption(*row) for row in rows)
    return CheckpointingProblem((options,) * num_blocks, head_bytes=80_000, floor_bytes=60_000)


def random_blocks(num_blocks, seed, num_choices=6):
    generator = np.random.default_rng(seed)
    blocks = []
    for _ in range(num_blocks):
        size = int(generator.integers(10**7, 10**9))
        shares = [1.0, *generator.uniform(0.03, 0.6, num_choices - 1)]
        seconds = [0.0, *generator.uniform(1e-4, 5e-3, num_choices - 1)]
        peaks = generator.uniform(1.0, 1.6, num_choices)
        rows = zip(CHOICES, shares, peaks, seconds, strict=False)
        blocks.append(tuple(BlockOption(c, int(k * size), int(p * size), s) for c, k, p, s in rows))
    return CheckpointingProblem(tuple(blocks), head_bytes=int(3e8), floor_bytes=int(4e8))


def ten_budgets(frontier):
    return np.linspace(frontier.minimum_bytes, frontier.maximum_bytes, 10).astype(int).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_equals_exhaustive_search(seed):
    problem = random_blocks(4, seed, num_choices=4)
    plans = list(itertools.product(CHOICES[:4], repeat=4))
    frontier = PlanFrontier(problem)
    assert frontier.minimum_bytes == min(problem.peak_bytes(plan) for plan in plans)
    for budget in ten_budgets(frontier):
        best = min(problem.seconds(plan) for plan in plans if problem.peak_bytes(plan) <= budget)
        assert frontier.plan_for(budget).seconds == pytest.approx(best)


@pytest.mark.parametrize("problem", [equal_blocks(96), random_blocks(48, 2), random_blocks(96, 3)])
def test_fast_within_the_budget_and_monotonic(problem):
    started = time.process_time()
    frontier = PlanFrontier(problem)
    assert time.process_time() - started < 1.0
    budgets = np.linspace(frontier.minimum_bytes, 1.05 * frontier.maximum_bytes, 500).astype(int).tolist()
    plans = [frontier.plan_for(budget) for budget in budgets]
    assert all(plan.peak_bytes <= budget for plan, budget in zip(plans, budgets, strict=True))
    assert all(b.seconds <= a.seconds + 1e-9 for a, b in itertools.pairwise(plans))
    assert plans[-1].choices == ("none",) * len(problem.blocks)
    assert plans == [PlanFrontier(problem).plan_for(budget) for budget in budgets[:1]] + plans[1:]


# Problems of up to five blocks, small enough for every plan to be tried. Blocks need not be alike, options need not be
# sensible (slower and larger than another), and figures coincide often, which is where comparisons go wrong.


@st.composite
def small_problems(draw):
    small = st.integers(0, 12)
    blocks = []
    for _ in range(draw(st.integers(1, 5))):
        choices = draw(st.lists(st.sampled_from(CHOICES), min_size=1, max_size=3, unique=True))
        blocks.append(tuple(BlockOption(c, draw(small), draw(small), draw(small) / 4) for c in choices))
    return CheckpointingProblem(tuple(blocks), head_bytes=draw(small), floor_bytes=draw(small))


@given(small_problems())
def test_small_problems_are_solved_as_by_trying_every_plan(problem):
    plans = list(itertools.product(*([option.choice for option in options] for options in problem.blocks)))
    figures = [(problem.peak_bytes(plan), problem.seconds(plan)) for plan in plans]
    frontier = PlanFrontier(problem)
    assert frontier.minimum_bytes == min(peak for peak, _ in figures)
    fastest = min(seconds for _, seconds in figures)
    assert frontier.maximum_bytes == min(peak for peak, seconds in figures if seconds == fastest)
    previous = float("inf")
    for budget in range(frontier.minimum_bytes, frontier.maximum_bytes + 3):
        plan = frontier.plan_for(budget)
        assert (plan.peak_bytes, plan.seconds) == (problem.peak_bytes(plan.choices), problem.seconds(plan.choices))
        assert plan.peak_bytes <= budget
        assert plan.seconds == min(seconds for peak, seconds in figures if peak <= budget)
        assert plan.seconds <= previous
        previous = plan.seconds
    with pytest.raises(ValueError, match="below the least peak"):
        frontier.plan_for(frontier.minimum_bytes - 1)


@given(small_problems(), st.integers(0, 30), st.integers(0, 30))
def test_a_step_that_needs_more_around_its_blocks_is_never_faster(problem, more_head, budget):
    larger = CheckpointingProblem(problem.blocks, problem.head_bytes + more_head, problem.floor_bytes)
    first, second = PlanFrontier(problem), PlanFrontier(larger)
    assert first.minimum_bytes <= second.minimum_bytes
    if budget >= second.minimum_bytes:
        assert first.plan_for(budget).seconds <= second.plan_for(budget).seconds
