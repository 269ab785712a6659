import pytest
import torch

from lightning_memfit.models.optimizer import checked_options, optimizer_class


@pytest.mark.parametrize("name", ["AdamW", "torch.optim.AdamW"])
def test_found_by_name_and_by_path(name):
    assert optimizer_class(name) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("name", "message"),
    [("AdamWW", r"Closest: AdamW"), ("no.such.Thing", "cannot be imported"), ("torch.nn.Linear", "is no optimizer")],
)
def test_unknown(name, message):
    with pytest.raises(ValueError, match=message):
        optimizer_class(name)


def test_options():
    assert checked_options({"betas": [0.9, 0.95]}) == {"betas": (0.9, 0.95)}
    assert checked_options(None) == {}
    with pytest.raises(ValueError, match=r"`optimizer_options.lr` is set by `learning_rate`"):
        checked_options({"lr": 1.0})
