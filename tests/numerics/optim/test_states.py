"""States of 8 and 32 bits: what bitsandbytes' own tests check of its own, of our conversions of them."""

import copy
import io
import itertools

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_memfit.optim.eight_bit import to_bitsandbytes
from lightning_memfit.optim.exchange import exchange
from lightning_memfit.optim.states import RECORD, Resume, family_of, moments_of
from tests.numerics.optim.cases import check_states


def parameters(*shapes, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to(dtype)) for shape in shapes]


def give_gradients(stepped, step, scale=0.01):
    generator = torch.Generator().manual_seed(step)
    for p in stepped:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def train(optimizer, stepped, steps):
    for step in steps:
        give_gradients(stepped, step)
        optimizer.step()


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# --- odd parameters ---------------------------------------------------------------------------------------------------


def test_empty_and_single_element_parameters():
    ours, reference = (parameters((0, 4), (), (1,), (64, 64)) for _ in range(2))
    optimizer = to_bitsandbytes(torch.optim.AdamW(ours, lr=1e-2), min_8bit_size=0)
    train(optimizer, ours, range(3))
    check_states(optimizer)
    train(torch.optim.AdamW(reference, lr=1e-2), reference, range(3))
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
    again = to_bitsandbytes(torch.optim.AdamW(ours, lr=1e-2), min_8bit_size=0)
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    train(again, ours, range(1))


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("layout", ["transposed", "channels last", "part of a buffer"])
def test_a_parameter_stays_where_it_is(layout, bits):
    """bitsandbytes moves one that is not contiguous to new memory, which views of the old don't see."""

    def make():
        torch.manual_seed(0)
        if layout == "transposed":
            memory = torch.randn(128, 64)
            return memory, memory.t()
        if layout == "channels last":
            memory = torch.randn(16, 8, 8, 8).to(memory_format=torch.channels_last)
            return memory, memory
        memory = torch.randn(64, 256)
        return memory, memory[:, ::2]

    memory, view = make()
    ours = [nn.Parameter(view)]
    plain = [nn.Parameter(view.clone(memory_format=torch.contiguous_format))]
    train(to_bitsandbytes(torch.optim.AdamW(plain, lr=1e-2), bits=bits), plain, range(3))
    optimizer = to_bitsandbytes(torch.optim.AdamW(ours, lr=1e-2), bits=bits)
    train(optimizer, ours, range(1))
    saved = through_a_file(optimizer.state_dict())
    optimizer = to_bitsandbytes(torch.optim.AdamW(ours, lr=1e-2), bits=bits)
    optimizer.load_state_dict(saved)
    train(optimizer, ours, range(1, 3))
    assert torch.equal(ours[0], plain[0])
    assert ours[0].data_ptr() == memory.data_ptr()
    assert ours[0].stride() == view.stride()
    assert torch.equal(view, plain[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_of_which_a_part_would_be_lost_are_refused(dtype):
    made = [nn.Parameter(torch.zeros(4, dtype=dtype))]
    with pytest.raises(ValueError, match=str(dtype)):
        exchange(torch.optim.AdamW(made), "bitsandbytes.Lion", {"betas": (0.9, 0.99)})
    optimizer = to_bitsandbytes(torch.optim.AdamW(parameters((4,))))
    optimizer.add_param_group({"params": made})
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=f"computes in float32, which a {dtype} parameter"):
        optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)


# --- copies, overrides, hooks -----------------------------------------------------------------------------------------


CONVERSIONS = {
    "8-bit": to_bitsandbytes,
    "32-bit": lambda old: to_bitsandbytes(old, bits=32),
    "Lion": lambda old: exchange(old, "bitsandbytes.Lion", {"betas": (0.9, 0.99)}),
    "fused": lambda old: exchange(old, "torch.AdamW", {"fused": True}),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_deep_copy_steps_by_itself(name):
    module = nn.Linear(64, 128)
    optimizer = CONVERSIONS[name](torch.optim.AdamW(module.parameters(), lr=1e-2))
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(optimizer, list(module.parameters()), range(2))
    other, copied, _ = copy.deepcopy((module, optimizer, schedule))
    before = other.weight.detach().clone()
    train(optimizer, list(module.parameters()), range(2, 4))
    assert torch.equal(other.weight, before)
    train(copied, list(other.parameters()), range(2, 4))
    assert torch.equal(other.weight, module.weight)
    assert copied.state[other.weight]["step"] == 4


@pytest.fixture
def manager():
    found = bnb.optim.GlobalOptimManager.get_instance()
    yield found
    found.pid2config.clear()
    found.index2config.clear()


@pytest.mark.parametrize("before", [True, False])
def test_an_override_counts_whenever_it_was_registered(manager, before):
    first, second = parameters((64, 64), (64, 64))
    if before:
        manager.override_config(second, "optim_bits", 32)
    optimizer = to_bitsandbytes(torch.optim.AdamW([first, second]))
    if not before:
        manager.override_config(second, "optim_bits", 32)
    train(optimizer, [first, second], range(1))
    assert [optimizer.state[p]["state1"].dtype for p in (first, second)] == [torch.uint8, torch.float32]


# --- from one to another ----------------------------------------------------------------------------------------------

ADAMS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "torch with names": lambda p: exchange(torch.optim.AdamW(p, lr=1e-2), "torch.AdamW"),
    "bitsandbytes": lambda p: bnb.optim.AdamW(p, lr=1e-2),
    "bitsandbytes 8-bit": lambda p: bnb.optim.AdamW8bit(p, lr=1e-2),
    "32-bit": lambda p: to_bitsandbytes(torch.optim.AdamW(p, lr=1e-2), bits=32),
    "8-bit": lambda p: to_bitsandbytes(torch.optim.AdamW(p, lr=1e-2)),
    "8-bit of bitsandbytes": lambda p: to_bitsandbytes(bnb.optim.AdamW(p, lr=1e-2)),
}
EXACT = {"torch", "torch with names", "bitsandbytes", "32-bit"}
OURS = [name for name in ADAMS if Resume.of(ADAMS[name](parameters((2,)))) is not None]


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ADAMS, OURS)))
def test_moments_go_from_every_adam_to_every_other(source, target):
    stepped, other = (parameters((64, 128), (16,)) for _ in range(2))
    plain, saved_by = torch.optim.AdamW(stepped, lr=1e-2), ADAMS[source](other)
    train(plain, stepped, range(3))
    train(saved_by, other, range(3))
    optimizer = ADAMS[target](stepped)
    optimizer.load_state_dict(through_a_file(saved_by.state_dict()))
    for p in stepped:
        step, moments = moments_of(optimizer.state[p], "Adam")
        assert step == 3
        for name in ("exp_avg", "exp_avg_sq"):
            expected = plain.state[p][name]
            error = (moments[name] - expected).norm() / expected.norm()
            assert error < (1e-6 if {source, target} <= EXACT else 0.04), (name, tuple(p.shape))
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2)
    assert optimizer.state_dict()[RECORD]["family"] == "Adam"


def stepped_by(cls, **kwargs):
    (p,) = parameters((64, 64))
    optimizer = cls([p], lr=1e-3, **kwargs)
    give_gradients([p], 0)
    optimizer.step(*([lambda: 0.0] if cls is torch.optim.LBFGS else []))
    return optimizer


FAMILIES = {
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "Adam",
    torch.optim.SGD: "SGD",
    bnb.optim.Adam: "Adam",
    bnb.optim.AdamW8bit: "Adam",
    bnb.optim.Lion: "Lion",
    bnb.optim.Lion8bit: "Lion",
    bnb.optim.SGD8bit: "SGD",
}
OTHERS = [
    getattr(torch.optim, name)
    for name in ("Adagrad", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "Rprop", "Adafactor", "RMSprop")
    if hasattr(torch.optim, name)
] + [bnb.optim.AdEMAMix, bnb.optim.RMSprop8bit]


@pytest.mark.parametrize(
    "cls", [*FAMILIES, *OTHERS], ids=lambda cls: f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
)
def test_an_unnamed_checkpoint_is_not_mistaken(cls):
    kwargs = {"momentum": 0.9} if cls.__name__ in ("SGD", "SGD8bit") else {}
    assert family_of(through_a_file(stepped_by(cls, **kwargs).state_dict())) == FAMILIES.get(cls, "")
