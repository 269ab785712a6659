"""Optimizer states belong to parameters by name; those of one device by their places in the optimizer's groups."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_memfit.strategies.saved_run import (
    group_names,
    in_order_of_groups,
    numbered_optimizer,
    parameter_names,
)


def made(order=((2, 0), (3, 1)), kind=torch.optim.AdamW):
    """Two layers of one shape and an optimizer whose groups are not in the module's order, after a step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = list(module.parameters())
    groups = [
        {"params": [parameters[place] for place in places], "lr": 0.1 * (index + 1)}
        for index, places in enumerate(order)
    ]
    optimizer = kind(groups, lr=0.1)
    module(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    return module, optimizer


def named(module, optimizer):
    (names,) = group_names([optimizer], parameter_names(module))
    return numbered_optimizer(optimizer.state_dict(), names, "last.ckpt")


def test_each_parameter_keeps_its_moments_and_group():
    module, optimizer = made()
    found = named(module, optimizer)
    names = parameter_names(module)
    assert [group["params"] for group in found.groups] == [["1.weight", "0.weight"], ["1.bias", "0.bias"]]
    assert [group["lr"] for group in found.groups] == [0.1, 0.2]
    for parameter, state in optimizer.state.items():
        assert torch.equal(found.states[names[id(parameter)]]["exp_avg"], state["exp_avg"])


def test_an_optimizer_without_states():
    found = named(*made(kind=torch.optim.SGD))
    assert found.groups[0]["params"] == ["1.weight", "0.weight"]
    assert found.states == {}


def test_names_stay():
    module, optimizer = made()
    found = named(module, optimizer)
    again = numbered_optimizer({"state": found.states, "param_groups": found.groups}, None, "last.ckpt")
    assert again.groups == found.groups
    assert again.states.keys() == found.states.keys()


@pytest.mark.parametrize("order", [((0, 2), (1, 3)), ((1, 3), (2, 0)), ((3,), (2, 0), (1,))])
def test_groups_in_another_order_get_their_own_states_and_options(order):
    module, optimizer = made()
    saved = named(module, optimizer)
    other, its_optimizer = made(order)
    names = parameter_names(other)
    its_optimizer.load_state_dict(saved.state_dict(its_optimizer.param_groups, names, numbered=True))
    by_name = dict(other.named_parameters())
    for name, state in saved.states.items():
        assert torch.equal(its_optimizer.state[by_name[name]]["exp_avg"], state["exp_avg"])
    for group in its_optimizer.param_groups:
        assert {0.1 if names[id(p)].endswith("weight") else 0.2 for p in group["params"]} == {group["lr"]}


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (((2, 0), (3,), (1,)), "groups of 2, 2 parameters, this run of 2, 1, 1"),
        (((2, 3), (0, 1)), r"shape \(4, 4\) where this run's '1.bias' has \(4,\)"),
    ],
)
@pytest.mark.parametrize("numbered", [True, False])
def test_other_groups_are_refused_where_names_are_not_known(order, words, numbered):
    saved = made()[1].state_dict()
    module, optimizer = made(order)
    names = parameter_names(module)
    with pytest.raises(ValueError, match=words):
        numbered_optimizer(saved, group_names([optimizer], names)[0], "last.ckpt").state_dict(
            optimizer.param_groups, names, numbered
        )


def test_a_group_of_parameters_with_different_options_is_refused():
    saved = named(*made())
    module, optimizer = made(((0, 1, 2, 3),))
    with pytest.raises(ValueError, match=r"'.*' in a group whose lr differ"):
        saved.state_dict(optimizer.param_groups, parameter_names(module), numbered=True)


def test_a_parameter_of_no_group_is_refused():
    saved = named(*made(((2, 0), (3,))))
    module, optimizer = made()
    with pytest.raises(ValueError, match="has no optimizer group with '0.bias'"):
        saved.state_dict(optimizer.param_groups, parameter_names(module), numbered=True)


def test_a_group_without_parameters_keeps_the_options_of_its_place():
    module, optimizer = made(((2, 0), (), (3, 1)))
    optimizer.param_groups[1]["lr"] = 0.7
    saved = named(module, optimizer)
    other, its_optimizer = made(((3, 1), (), (2, 0)))
    its_optimizer.load_state_dict(saved.state_dict(its_optimizer.param_groups, parameter_names(other), numbered=True))
    assert [group["lr"] for group in its_optimizer.param_groups] == pytest.approx([0.3, 0.7, 0.1])


SCHEDULES = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=9
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, min_lr=[group["lr"] / 4 for group in optimizer.param_groups]
    ),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2]
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), lr_scheduler.ConstantLR(optimizer)], optimizer
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, None), (None, 1, 0)])
def test_schedules_follow_groups_in_another_order(name, order):
    """A group that is new begins its schedule, and one without parameters is at no place that counts."""

    def steps(optimizer, schedule, count):
        rates = []
        for _ in range(count):
            optimizer.step()
            schedule.step(*((1.0,) if name == "plateau" else ()))
            rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})
        return rates

    def run(order):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [
            {"params": [] if place is None else list(module[place].parameters()), "lr": 10.0 ** (place or 0)}
            | {"name": str(place)}
            for place in order
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return module, optimizer, SCHEDULES[name](optimizer)

    module, optimizer, schedule = run((0, 1))
    steps(optimizer, schedule, 3)
    saved, state = named(module, optimizer), schedule.state_dict()
    expected = steps(optimizer, schedule, 4)
    module, optimizer, schedule = run(order)
    groups = group_names([optimizer], parameter_names(module))
    state_dict = saved.state_dict(optimizer.param_groups, parameter_names(module), numbered=True)
    optimizer.load_state_dict(state_dict)
    (ordered,) = in_order_of_groups([copy.deepcopy(state)], [schedule], [optimizer], [saved], groups)
    schedule.load_state_dict(ordered)
    found = steps(optimizer, schedule, 4)
    assert [{key: rates[key] for key in "01"} for rates in found] == expected
