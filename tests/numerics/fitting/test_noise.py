"""The noise of a comparison: a sample gets the same whatever the batch around it, and mixing of samples shows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_memfit.fitting.step.noise import SameNoise, without_recurrent_dropout

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout2d": lambda x: functional.dropout2d(x[:, :, None, None], 0.5),
    "randn": lambda x: x + torch.randn(x.shape),
    "randn_like": lambda x: x + torch.randn_like(x),
    "time first": lambda x: (x.T + torch.randn(x.T.shape[0], 1)).T,
    "rand": lambda x: x * (torch.rand(x.shape) < 0.3),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 3),
    "normal": lambda x: torch.normal(x, 0.5),
    "timesteps": lambda x: x * torch.randint(0, 1000, (len(x), 1)),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full(x.shape, 0.15)),
    "one for all": lambda x: x * torch.rand(()),
    "multinomial": lambda x: x * torch.multinomial(x.softmax(1), 1),
    "several": lambda x: x * torch.multinomial(x.softmax(1), 2).sum(1, keepdim=True),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "attention": lambda x: functional.scaled_dot_product_attention(*3 * (x[:, None, :, None],), dropout_p=0.3)[:, 0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_samples_get_the_same_together_and_apart(name: str) -> None:
    draw, x = DRAWS[name], torch.randn(6, 4)
    with SameNoise() as noise:
        noise.begin_part()
        whole, parts = draw(x), torch.cat([draw(x[:2]), draw(x[2:])])
    torch.testing.assert_close(whole, parts)
    assert not noise.repeats


def test_permutations_and_chosen_samples_show() -> None:
    x = torch.randn(6, 4)
    for mixed in (lambda part: part[torch.randperm(len(part))], lambda part: part[torch.randint(len(part), (1,))]):
        with SameNoise() as noise:
            noise.begin_part()
            whole, parts = mixed(x).sum(0), mixed(x[:2]).sum(0) + mixed(x[2:]).sum(0)
            moved = mixed(x)
        assert not torch.allclose(whole, parts) or not torch.equal(moved, x)


def test_generators_that_every_part_seeds_are_noticed() -> None:
    own = torch.Generator().manual_seed(1)
    for seeds in (False, True):
        with SameNoise() as noise:
            for _ in range(2):
                noise.begin_part()
                torch.rand(3, generator=torch.Generator().manual_seed(4) if seeds else own)
        assert noise.repeats == seeds


def test_what_losses_leave_out_and_the_least_width_are_noted() -> None:
    with SameNoise() as noise:
        functional.cross_entropy(torch.randn(3, 5), torch.tensor([1, 7, 2]), ignore_index=7)
        torch.ones(2, dtype=torch.bfloat16) + 1
    assert noise.ignored == {7}
    assert noise.least_bits == 16


def test_dropout_between_recurrent_layers_is_switched_off_for_a_while() -> None:
    module = nn.LSTM(2, 2, num_layers=2, dropout=0.5)
    with without_recurrent_dropout(module):
        assert module.dropout == 0.0
    assert module.dropout == 0.5
