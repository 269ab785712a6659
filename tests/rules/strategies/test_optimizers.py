"""Which optimizers are known to step flat vectors, or parts, otherwise than whole weights."""

import pytest
import torch
import transformers
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_memfit.strategies.optimizers import check_divided, check_flat


def parameters():
    return [torch.nn.Parameter(torch.ones(8, 4))]


class LAMB(torch.optim.SGD):
    """As other packages name it."""


class OwnLamb(LAMB):
    """Of a user."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_those_that_step_every_element_alike_are_taken(kind):
    check_flat(kind(parameters(), lr=0.1), "memfit_zero_2")
    check_divided(kind(parameters(), lr=0.1), "memfit_fsdp2")


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, transformers.Adafactor, LAMB, OwnLamb])
def test_those_that_need_shapes_are_refused(kind):
    with pytest.raises(MisconfigurationException, match=f"`{kind.__name__}` would give other weights .*memfit_ddp"):
        check_flat(kind(parameters()), "memfit_zero_2")
    check_divided(kind(parameters()), "memfit_fsdp2")


def test_those_that_join_weights_are_refused():
    with pytest.raises(MisconfigurationException, match="a rank has parts of weights"):
        check_divided(torch.optim.LBFGS(parameters()), "memfit_fsdp2")
