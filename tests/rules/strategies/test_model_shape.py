import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.strategies.model_shape import ModelShape


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
    shape = ModelShape.of(module)
    assert module.network is None
    assert torch.equal(torch.get_rng_state(), state)
    module.configure_model()
    assert shape.parameters == parameter_table(module)
    assert shape == ModelShape.of_built(module)


def test_what_a_module_owns_itself() -> None:
    module = Late()
    module.configure_model()
    shape = ModelShape.of_built(module)
    assert shape.numels_by_module == ((128, 16), (64,))
    assert (shape.most_per_module(1), shape.most_per_module(20), shape.most_per_module(1000)) == (2, 1, 0)


def test_module_that_needs_more_than_shapes() -> None:
    with pytest.raises(MisconfigurationException, match=r"Odd.configure_model .*OSError: no such file.* `__init__`"):
        ModelShape.of(Odd())
