"""Which optimizers step flat vectors as they step weights one by one: found out by trying."""

import pytest
import torch
import transformers
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_memfit.strategies.optimizers import check_divided, check_flat


def parameters():
    return [torch.nn.Parameter(torch.ones(8, 4))]


class Lamb(torch.optim.SGD):
    """Scales an update by the norm of its weight."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad


class NeedsMore(torch.optim.SGD):
    """Can't be made from its options."""

    def __init__(self, weights, names):
        super().__init__(weights, lr=0.1)
        self.names = names


BY_ELEMENTS = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adamax", "Adadelta", "Rprop", "ASGD"]


@pytest.mark.parametrize("name", BY_ELEMENTS)
@pytest.mark.parametrize("rate", [0.0, 1e-5])
def test_those_that_step_every_element_alike_are_taken(name, rate):
    check_flat(getattr(torch.optim, name)(parameters(), lr=rate), "memfit_zero_2")


def test_the_user_s_options_are_tried():
    optimizer = torch.optim.SGD([{"params": parameters(), "momentum": 0.9, "weight_decay": 0.1}], lr=0.1)
    check_flat(optimizer, "memfit_zero_2")
    assert not optimizer.state


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.optim.Adafactor(parameters(), lr=1e-2), "`Adafactor` would give other weights"),
        (lambda: torch.optim.Muon(parameters(), lr=1e-2), "`Muon` can't step here"),
        (lambda: Lamb(parameters(), lr=1e-2), "`Lamb` would give other weights"),
        (lambda: transformers.Adafactor(parameters()), "`Adafactor` would give other weights"),
    ],
)
def test_those_that_need_shapes_are_refused(make, words):
    with pytest.raises(MisconfigurationException, match=words):
        check_flat(make(), "memfit_zero_2")


def test_what_can_not_be_tried_is_left_to_the_user():
    check_flat(NeedsMore(parameters(), names=["a"]), "memfit_zero_2")


def test_parts_that_can_not_be_stepped_are_refused():
    class Divided(torch.Tensor):
        """Stands for what torch divides."""

        def full_tensor(self):
            return self.as_subclass(torch.Tensor)

    check_divided(torch.optim.AdamW(parameters()), lambda weight: weight.as_subclass(Divided), "memfit_fsdp2")
