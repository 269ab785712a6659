import pytest
import torch

from lightning_memfit.optim.rounding import Copies, Kahan, Stochastic, generator_for
from lightning_memfit.optim.rounding import round_stochastically_ as round_with_scratch_


def generator(seed=0, num_steps=0):
    return generator_for(torch.device("cpu"), seed, num_steps)


def round_stochastically_(values, generator):
    return round_with_scratch_(values, generator, torch.empty_like(values))


def loaded(rounding, weight, state):
    values = Copies([weight])
    rounding.load(values, [state])
    return values.parts[0]


def step(rounding, weight, state, update, generator):
    """Load a weight, add to it, and store it."""
    values = Copies([weight])
    rounding.load(values, [state])
    values.parts[0].add_(update)
    rounding.store(values, [state], values.beside(), generator)


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


def test_compensation_holds_what_the_weight_lacks():
    weight, state, kahan = torch.ones(3, dtype=torch.bfloat16), {}, Kahan()
    for _ in range(100):
        step(kahan, weight, state, -1e-4, generator())
    torch.testing.assert_close(loaded(kahan, weight, state), torch.full((3,), 0.99), rtol=0, atol=2e-4)
    assert state["compensation"].dtype is torch.bfloat16
    plain = torch.ones(3, dtype=torch.bfloat16)
    for _ in range(100):
        plain.copy_(plain.float() - 1e-4)
    assert torch.equal(plain, torch.ones(3, dtype=torch.bfloat16))


def test_stochastic_needs_no_state():
    weight, state = torch.ones(4096, dtype=torch.bfloat16), {}
    for num_steps in range(100):
        step(Stochastic(), weight, state, -1e-5, generator(0, num_steps))
    assert not state
    assert weight.double().mean().item() == pytest.approx(0.999, abs=2e-4)


def test_compensation_is_dropped_where_other_code_has_written():
    weight, state, kahan = torch.ones(4, dtype=torch.bfloat16), {}, Kahan()
    step(kahan, weight, state, -1e-3, generator())
    assert (state["compensation"] != 0).all()
    weight[:2] = torch.tensor([0.0, 1e-3])
    values = loaded(kahan, weight, state)
    assert torch.equal(values[:2], weight[:2].float())
    torch.testing.assert_close(values[2:], torch.full((2,), 0.999), rtol=0, atol=1e-5)


def test_compensation_always_belongs_to_the_weight_it_was_kept_for():
    """No rounding of the kept part, not even on a tie or at a power of two, makes the sum round elsewhere."""
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), dtype=torch.int64, generator=torch.Generator().manual_seed(2))
    values = torch.cat([bits.to(torch.int32).view(torch.float32), torch.arange(-4096.0, 4096.0) / 4096 + 1])
    values = values[values.isfinite() & (values.abs() < 1e38)]
    weight, state, kahan = torch.zeros_like(values, dtype=torch.bfloat16), {}, Kahan()
    step(kahan, weight, state, values, generator())
    assert torch.equal(loaded(kahan, weight, state), weight.float() + state["compensation"])
