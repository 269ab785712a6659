"""Optimizer states of one device belong to parameters by their places in the optimizer's groups."""

import pytest
import torch
from torch import nn

from lightning_memfit.strategies.checkpoints import named_states


def made(order=((2, 0), (3, 1)), kind=torch.optim.AdamW):
    """Two layers of one shape and an optimizer whose groups are not in the module's order, after a step."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names, parameters = zip(*module.named_parameters(), strict=True)
    groups = [
        {"params": [parameters[place] for place in places], "lr": 0.1 * (index + 1)}
        for index, places in enumerate(order)
    ]
    optimizer = kind(groups, lr=0.1)
    module(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    return module, optimizer, {id(parameter): name for name, parameter in zip(names, parameters, strict=True)}


def test_each_parameter_keeps_its_moments_and_group():
    _, optimizer, names = made()
    found = named_states(optimizer.state_dict(), optimizer.param_groups, names, "last.ckpt")
    assert [group["params"] for group in found["param_groups"]] == [["1.weight", "0.weight"], ["1.bias", "0.bias"]]
    assert [group["lr"] for group in found["param_groups"]] == [0.1, 0.2]
    for parameter, state in optimizer.state.items():
        assert torch.equal(found["state"][names[id(parameter)]]["exp_avg"], state["exp_avg"])


def test_an_optimizer_without_states():
    _, optimizer, names = made(kind=torch.optim.SGD)
    found = named_states(optimizer.state_dict(), optimizer.param_groups, names, "last.ckpt")
    assert found["param_groups"][0]["params"] == ["1.weight", "0.weight"]


def test_names_stay():
    _, optimizer, names = made()
    named = named_states(optimizer.state_dict(), optimizer.param_groups, names, "last.ckpt")
    assert named_states(named, optimizer.param_groups, names, "last.ckpt") is named


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (((2, 0), (3,), (1,)), "groups of 2, 2 parameters, this run of 2, 1, 1"),
        (((2, 3), (0, 1)), r"shape \(4, 4\) where this run's '1.bias' has \(4,\)"),
    ],
)
def test_other_groups_are_refused(order, words):
    saved = made()[1].state_dict()
    _, optimizer, names = made(order)
    with pytest.raises(ValueError, match=words):
        named_states(saved, optimizer.param_groups, names, "last.ckpt")
