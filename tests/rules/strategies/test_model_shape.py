import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memfit.estimate.deepspeed_sizes import most_per_module
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.strategies.zero_infinity import parameters_once_built


class Late(LightningModule):
    """Builds itself when Lightning asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.network: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.network is None:
            self.network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4, bias=False))


class Odd(Late):
    def configure_model(self) -> None:
        raise OSError("no such file")


def test_shapes_are_known_before_the_module_is_built() -> None:
    module = Late()
    state = torch.get_rng_state()
    parameters = parameters_once_built(module)
    assert module.network is None
    assert torch.equal(torch.get_rng_state(), state)
    module.configure_model()
    assert parameters == parameter_table(module)
    assert [most_per_module(parameters, least) for least in (1, 20, 1000)] == [2, 1, 0]


def test_module_that_needs_more_than_shapes() -> None:
    with pytest.raises(MisconfigurationException, match=r"Odd.configure_model .*OSError: no such file.* `__init__`"):
        parameters_once_built(Odd())
