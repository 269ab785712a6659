import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from lightning_memfit.memory import Category
from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.optim.float32_step import Float32Step
from lightning_memfit.optim.gradient_release import GradientRelease
from tests.numerics.optim.cases import CASES


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.frozen(self.body(self.embedding(tokens)))), tokens)


def train(make_optimizer, released, num_steps=4, clip_value=None):
    torch.manual_seed(0)
    model = Tied()
    optimizer = make_optimizer([{"params": [p], "lr": 1e-2} for p in model.parameters()])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    release = GradientRelease(optimizer, clip_value) if released else None
    for _ in range(num_steps):
        model(torch.randint(0, 64, (32,))).backward()
        if released:
            assert all(p.grad is None for p in model.parameters())
        elif clip_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer, release


def assert_same(first, second):
    for (name, a), (_, b) in zip(first[0].named_parameters(), second[0].named_parameters(), strict=True):
        assert torch.equal(a, b), name
    ours, theirs = first[1].state_dict(), second[1].state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()


@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_stepping_afterwards(name):
    cls, kwargs = CASES[name]

    def make(groups):
        return cls(groups, **kwargs)

    assert_same(train(make, True), train(make, False))


@pytest.mark.parametrize("kwargs", [{"foreach": True}, {"fused": True}, {"foreach": False}, {"amsgrad": True}])
def test_forms_of_adamw(kwargs):
    def make(groups):
        return torch.optim.AdamW(groups, **kwargs)

    assert_same(train(make, True), train(make, False))


def test_gradients_are_never_all_alive():
    def peak(released):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if released:
            GradientRelease(optimizer)
        with StorageLedger() as ledger:
            ledger.track_module(model)
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
        ledger.close()
        return ledger.peak_bytes - ledger.live_by_category[Category.PARAMETER]

    weight = 64 * 64 * 4
    assert peak(False) > 10 * weight
    assert peak(True) < 4 * weight


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Float32Step], ids=["released", "rounded"])
def test_what_bitsandbytes_is_told_of_one_parameter_is_refused(wrap):
    manager = bnb.optim.GlobalOptimManager.get_instance()
    before = dict(vars(manager))
    manager.initialize()
    try:
        model = nn.Linear(64, 64).bfloat16()
        manager.override_config(model.weight, "lr", 0.0)
        optimizer = wrap(bnb.optim.AdamW8bit(model.parameters()))
        GradientRelease(optimizer)
        with pytest.raises(ValueError, match="override_config"):
            model(torch.ones(2, 64).bfloat16()).sum().backward()
    finally:
        vars(manager).update(before)


def test_accumulation_is_refused():
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    GradientRelease(optimizer)
    tokens = torch.randint(0, 64, (32,))
    model(tokens).backward()
    with pytest.raises(RuntimeError, match="second backward pass"):
        model(tokens).backward()
    optimizer.step()
    model(tokens).backward()


def test_optimizers_that_couple_parameters_are_refused():
    class Unknown(torch.optim.AdamW):
        pass

    parameters = [nn.Parameter(torch.ones(2))]
    GradientRelease(bnb.optim.AdamW8bit(parameters)).remove()
    with pytest.raises(ValueError, match="LBFGS"):
        GradientRelease(torch.optim.LBFGS(parameters))
    with pytest.raises(ValueError, match="Unknown"):
        GradientRelease(Unknown(parameters))
