import pytest
import torch

from lightning_memfit.optim.rounding import generator_for
from lightning_memfit.optim.rounding import round_stochastically_ as round_with_scratch_


def generator(seed=0, num_steps=0):
    return generator_for(torch.device("cpu"), seed, num_steps)


def round_stochastically_(values, generator):
    return round_with_scratch_(values, generator, torch.empty_like(values))


@pytest.mark.parametrize("value", [1.0, -1.0, 3.1415927, 1e-20, -2.7e30, 1e-40])
def test_mean_is_the_value_and_only_neighbours_come_out(value):
    exact = torch.tensor(value).to(torch.float64)
    rounded = round_stochastically_(torch.full((1 << 20,), value), generator())
    assert torch.equal(rounded, rounded.to(torch.bfloat16).float())
    neighbours = rounded.unique().double()
    spacing = (neighbours.max() - neighbours.min()).item()
    assert len(neighbours) <= 2
    assert neighbours.min() <= exact <= neighbours.max()
    assert abs(rounded.double().mean() - exact) <= 5 * 0.5 * spacing / 2**10  # five standard errors


def test_what_bfloat16_holds_stays():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
    values[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically_(values.clone(), generator()), values)
    assert round_stochastically_(values.clone(), generator())[1].signbit()


def test_every_nan_stays_one():
    patterns = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, -0x3FFFFF], dtype=torch.int32)
    values = patterns.view(torch.float32).repeat(1000)
    assert values.isnan().all()
    assert round_stochastically_(values, generator()).isnan().all()


def test_bits_depend_on_seed_and_step_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    draws = {
        pair: torch.empty(64).random_(1 << 16, generator=generator(*pair)) for pair in [(0, 0), (0, 1), (1, 0), (-1, 7)]
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draws[0, 1], torch.empty(64).random_(1 << 16, generator=generator(0, 1)))
    assert len({tuple(draw.tolist()) for draw in draws.values()}) == 4
