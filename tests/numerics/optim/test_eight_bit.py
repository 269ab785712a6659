import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.optim.eight_bit import embedding_parameters, repage_states, to_bitsandbytes
from tests.numerics.optim.cases import CASES, check_states


def steps(optimizer, parameters, num_steps=5):
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def parameters(dtype=torch.float32):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(64, 128, dtype=dtype)), nn.Parameter(torch.randn(16, dtype=dtype))]


@pytest.mark.parametrize("name", CASES)
def test_32_bit_form_computes_the_same(name):
    cls, kwargs = CASES[name]
    expected = steps(cls(reference := parameters(), **kwargs), reference)
    stepped = parameters()
    converted = to_bitsandbytes(cls(stepped, **kwargs), bits=32)
    actual = steps(converted, stepped)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_8_bit_form_stays_close(name, dtype):
    cls, kwargs = CASES[name]
    reference = [nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    expected = steps(cls(reference, **kwargs), reference)
    stepped = parameters(dtype)
    converted = to_bitsandbytes(cls(stepped, **kwargs))
    steps(converted, stepped)
    check_states(converted)
    large, small = stepped
    assert converted.state[large]["state1"].dtype is torch.uint8
    assert converted.state[small]["state1"].dtype is torch.float32
    moved = (expected[0] - parameters(dtype)[0].float()).abs().mean()
    error = (large.float() - expected[0]).abs().mean()
    assert error < (0.1 if dtype is torch.float32 else 0.3) * moved  # bf16 weights round every step


def test_groups_and_hyper_parameters_are_kept():
    first, second = parameters()
    original = torch.optim.AdamW(
        [
            {"params": [first], "lr": 3e-4, "weight_decay": 0.3, "name": "decayed"},
            {"params": [second], "betas": (0.5, 0.6), "eps": 1e-3},
        ],
        lr=1e-3,
        weight_decay=0.0,
    )
    converted = to_bitsandbytes(original, min_8bit_size=100)
    assert isinstance(converted, bnb.optim.AdamW8bit)
    a, b = converted.param_groups
    assert (a["lr"], a["weight_decay"], a["name"], a["params"][0]) == (3e-4, 0.3, "decayed", first)
    assert (b["lr"], b["weight_decay"], b["betas"], b["eps"]) == (1e-3, 0.0, (0.5, 0.6), 1e-3)
    assert converted.args.min_8bit_size == 100
    converted.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert converted.param_groups[2]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "message"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.AdamW, {"maximize": True}, "maximize=True"),
        (torch.optim.AdamW, {"differentiable": True}, "differentiable=True"),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1)}, "tensor as `lr`"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "decoupled"),
        (torch.optim.SGD, {}, "momentum=0"),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "nesterov=True"),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, "dampening=0.5"),
        (torch.optim.RMSprop, {}, "RMSprop"),
        (bnb.optim.AdamW8bit, {}, "or is one"),
        (bnb.optim.LAMB, {}, "LAMB"),
    ],
)
def test_what_would_change_the_numbers_is_refused(optimizer, kwargs, message):
    with pytest.raises(ValueError, match=message):
        to_bitsandbytes(optimizer(parameters(), **{"lr": 0.1, **kwargs}))


def test_a_lion_that_is_none_is_refused():
    Lion = type("Lion", (torch.optim.SGD,), {})  # one of many of this name, whose groups don't show what else they do
    with pytest.raises(ValueError, match=r"Lion` has no 8-bit form"):
        to_bitsandbytes(Lion(parameters(), lr=0.1, momentum=0.9))


def test_other_refusals():
    class MyAdamW(torch.optim.AdamW):
        pass

    with pytest.raises(ValueError, match="MyAdamW"):
        to_bitsandbytes(MyAdamW(parameters()))
    with pytest.raises(ValueError, match="float64"):
        to_bitsandbytes(torch.optim.AdamW(parameters(torch.float64)))
    with pytest.raises(ValueError, match="no paged SGD"):
        to_bitsandbytes(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9), paged=True)


def test_steps_on_fake_parameters():
    with FakeTensorMode():
        stepped = [nn.Parameter(torch.empty(64, 128)), nn.Parameter(torch.empty(16))]
        optimizer = to_bitsandbytes(torch.optim.AdamW(stepped, lr=0.1))
        for p in stepped:
            p.grad = torch.empty_like(p)
        optimizer.step()
    check_states(optimizer)
    assert optimizer.state[stepped[0]]["state1"].dtype is torch.uint8


@pytest.fixture(autouse=True)
def _clean_manager():
    manager = bnb.optim.GlobalOptimManager.get_instance()
    yield
    manager.pid2config.clear()
    manager.index2config.clear()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.embedding.weight


def stepped(module, **kwargs):
    optimizer = to_bitsandbytes(torch.optim.AdamW(module.parameters()), **kwargs)
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def test_embeddings_and_tied_heads_keep_32_bit_states():
    module = Tied()
    kept = embedding_parameters(module)
    assert [id(p) for p in kept] == [id(module.head.weight)]
    optimizer = stepped(module, keep_32bit=kept)
    check_states(optimizer)
    assert optimizer.state[module.head.weight]["state1"].dtype is torch.float32
    assert optimizer.state[module.body.weight]["state1"].dtype is torch.uint8
    assert optimizer.state[module.body.bias]["state1"].dtype is torch.float32  # 64 elements


def test_nothing_leaks_into_or_from_other_optimizers():
    module = Tied()
    stepped(module, keep_32bit=[module.body.weight])
    assert not bnb.optim.GlobalOptimManager.get_instance().pid2config
    assert stepped(module).state[module.body.weight]["state1"].dtype is torch.uint8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_paged_states_stay_paged_after_resume():
    def module():
        torch.manual_seed(0)
        return nn.Linear(512, 512).cuda()

    first = module()
    optimizer = stepped(first, paged=True)
    assert optimizer.state[first.weight]["state1"].is_paged
    second = module()
    second.load_state_dict(first.state_dict())
    resumed = to_bitsandbytes(torch.optim.AdamW(second.parameters()), paged=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert all(resumed.state[second.weight][key].is_paged for key in ("state1", "state2"))
    assert repage_states(resumed) == 0
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        b.grad = a.grad.clone()
    optimizer.step()
    resumed.step()
    assert torch.equal(first.weight, second.weight)
