"""States of random generators: the host's, and that of a rank's own device."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from lightning_memfit.memory.generators import NUMPY, PYTHON, TORCH, HostGenerator, random_state, set_random_state

DRAWS: list[tuple[HostGenerator, Callable[[int], Any], Callable[[], float]]] = [
    (PYTHON, random.seed, random.random),
    (PYTHON, random.seed, lambda: random.gauss(0.0, 1.0)),
    (NUMPY, numpy.random.seed, numpy.random.rand),
    (NUMPY, numpy.random.seed, numpy.random.randn),
    (TORCH, torch.manual_seed, lambda: torch.rand(()).item()),
    (TORCH, torch.manual_seed, lambda: torch.randn(()).item()),
    (TORCH, torch.manual_seed, lambda: torch.randn((), dtype=torch.float64).item()),
]


def drawn(draw: Callable[[], float], number: int = 3) -> list[float]:
    return [draw() for _ in range(number)]


@pytest.mark.parametrize(("generator", "seed", "draw"), DRAWS)
@pytest.mark.parametrize("earlier", range(3))
def test_a_state_is_right_however_much_was_drawn_before_and_after(
    generator: HostGenerator, seed: Callable[[int], Any], draw: Callable[[], float], earlier: int
) -> None:
    """An odd number of normal numbers leaves the second of a pair, whose draw moves no word."""
    seed(3)
    drawn(draw, earlier)
    first, again = generator.state(), generator.state()
    expected = drawn(draw)
    for saved in (first, again):
        generator.restore(saved)
        assert drawn(draw) == expected
    later = generator.state()
    expected = drawn(draw)
    generator.restore(later)
    generator.restore(later)
    assert drawn(draw) == expected


@pytest.mark.parametrize(("generator", "seed", "draw"), DRAWS)
def test_what_users_put_back_is_seen(
    generator: HostGenerator, seed: Callable[[int], Any], draw: Callable[[], float]
) -> None:
    """A state of the same words and position may keep a normal number, or another one."""
    own = {PYTHON: (random.getstate, random.setstate), TORCH: (torch.get_rng_state, torch.set_rng_state)}
    get, put = own.get(generator, (numpy.random.get_state, numpy.random.set_state))
    seed(0)
    draw()
    kept = get()  # type: ignore[operator]
    second = draw()
    generator.state()  # the same words, but nothing is kept any more
    put(kept)  # type: ignore[operator]
    state = generator.state()
    assert draw() == second
    generator.restore(state)
    assert draw() == second


def test_a_run_goes_on_with_the_state_of_the_device_that_was_used(monkeypatch):
    states = {index: torch.tensor([index]) for index in range(4)}
    fake = SimpleNamespace(
        get_rng_state=lambda device: states[device.index],
        set_rng_state=lambda state, device: states.__setitem__(device.index, state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    set_random_state(random_state(torch.device("cuda", 1)), torch.device("cuda", 0))
    assert {index: int(state) for index, state in states.items()} == {0: 1, 1: 1, 2: 2, 3: 3}
