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


def test_removal():
    model, _, release = train(torch.optim.AdamW, True)
    assert release.num_parameters == len(list(model.parameters())) - 2
    release.remove()
    release.remove()
    model(torch.randint(0, 64, (32,))).backward()
    assert model.head.weight.grad is not None


def test_hooks_that_are_registered_later_see_one_step_and_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    release, calls = GradientRelease(optimizer), []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    model(torch.ones(2, 4)).sum().backward()
    assert not calls
    optimizer.step()
    assert calls == ["own"]
    with pytest.raises(ValueError, match="SGD.*hook around its step, `.*<lambda>`"):
        release.refresh()
    handle.remove()
    release.refresh()


class Overridden(nn.Module):
    """An embedding with an override as `StableEmbedding` has, a weight that stays, and one that does as all do."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        manager = bnb.optim.GlobalOptimManager.get_instance()
        manager.register_module_override(self.embedding, "weight", {"optim_bits": 32})
        self.kept = nn.Linear(64, 64, bias=False)
        self.free = nn.Linear(64, 128, bias=False)

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.free(self.kept(self.embedding(tokens))), tokens)


@pytest.fixture
def overrides():
    """bitsandbytes' manager of the process, which forgets its overrides afterwards."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    before = dict(vars(manager))
    manager.initialize()
    yield manager
    vars(manager).update(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [1, -1])
def test_what_bitsandbytes_is_told_of_one_parameter_holds_for_it_alone(overrides, dtype, order):
    def run(released, in_float32):
        overrides.initialize()
        torch.manual_seed(0)
        model = Overridden().to(dtype)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = bnb.optim.AdamW8bit([*model.parameters()][::order], lr=1e-2)
        overrides.override_config(model.kept.weight, "lr", 0.0)
        if in_float32:
            optimizer = Float32Step(optimizer, 4096)
        release = GradientRelease(optimizer) if released else None
        for _ in range(2):
            model(torch.arange(64)).backward()
            assert release is None or model.free.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        assert "get_config" not in vars(getattr(optimizer, "wrapped", optimizer))
        moved = {name: not torch.equal(p, before[name]) for name, p in model.named_parameters()}
        return moved, {name: optimizer.state[p]["state1"].dtype for name, p in model.named_parameters()}

    plain = run(False, False)
    assert plain[0]["free.weight"]
    assert not plain[0]["kept.weight"]
    assert plain[1]["embedding.weight"] is torch.float32
    assert plain[1]["free.weight"] is torch.uint8
    assert run(True, False) == plain
    if dtype is torch.bfloat16:
        assert run(False, True)[1] == run(True, True)[1] == plain[1]
        assert not run(False, True)[0]["kept.weight"]
        assert not run(True, True)[0]["kept.weight"]


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
