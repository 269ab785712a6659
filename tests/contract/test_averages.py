"""Lightning's average of weights builds the module twice: techniques are put on once each, and change nothing."""

from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_memfit import ActivationCheckpointing, AttentionKernel
from tests.contract.runs import LanguageModel, loader
from tests.helpers.trainers import quiet_trainer

TECHNIQUES: dict[str, Callable[[], pl.Callback]] = {
    "attention kernel": AttentionKernel,
    "budget": lambda: ActivationCheckpointing(budget="80%"),
}


def averaged(late: bool, *callbacks: pl.Callback) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = LanguageModel(late=late)
    quiet_trainer(EMAWeightAveraging(), *callbacks, max_steps=3).fit(module, loader())
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.nightly_cases("budget-built", "budget-built in configure_model")
@pytest.mark.parametrize("late", [False, True], ids=["built at once", "built in configure_model"])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_averages_are_those_of_the_plain_run(name: str, late: bool) -> None:
    plain, ours = averaged(late), averaged(late, TECHNIQUES[name]())
    assert all(map(torch.equal, plain, ours))
