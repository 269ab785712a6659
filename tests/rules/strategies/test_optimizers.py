"""Which optimizers are known to step flat vectors, or parts, otherwise than whole weights."""

import pytest
import torch
import transformers
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_memfit.strategies.launched import DIVIDED, FLAT, check_optimizer


def parameters():
    return [torch.nn.Parameter(torch.ones(8, 4))]


class LAMB(torch.optim.SGD):
    """As other packages name it."""


class OwnLamb(LAMB):
    """Of a user."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_those_that_step_every_element_alike_are_taken(kind):
    check_optimizer(kind(parameters(), lr=0.1), "memfit_zero_2", FLAT)
    check_optimizer(kind(parameters(), lr=0.1), "memfit_fsdp2", DIVIDED)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, transformers.Adafactor, LAMB, OwnLamb])
def test_those_that_need_shapes_are_refused(kind):
    with pytest.raises(MisconfigurationException, match=f"`{kind.__name__}` would give other weights .*memfit_ddp"):
        check_optimizer(kind(parameters()), "memfit_zero_2", FLAT)
    check_optimizer(kind(parameters()), "memfit_fsdp2", DIVIDED)


def test_one_that_deepspeed_replaces_is_refused():
    with pytest.raises(MisconfigurationException, match="`Adagrad` .*: DeepSpeed constructs another one"):
        check_optimizer(torch.optim.Adagrad(parameters()), "memfit_zero_2", FLAT)
    check_optimizer(torch.optim.Adagrad(parameters()), "memfit_fsdp2", DIVIDED)


def test_those_that_join_weights_are_refused():
    with pytest.raises(MisconfigurationException, match="a rank has parts of weights"):
        check_optimizer(torch.optim.LBFGS(parameters()), "memfit_fsdp2", DIVIDED)
