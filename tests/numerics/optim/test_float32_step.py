import copy
import functools
import inspect

import bitsandbytes as bnb
import pytest
import torch
from lightning.fabric.utilities.types import Optimizable
from torch import nn

from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.optim.eight_bit import to_bitsandbytes
from lightning_memfit.optim.exchange import exchange
from lightning_memfit.optim.float32_step import Float32Step, default_chunk, pieces_of
from tests.numerics.optim.cases import CASES

SHAPES = [(96, 128), (16,), (5000,)]


def weights(dtype=torch.bfloat16):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape).to(torch.bfloat16).to(dtype)) for shape in SHAPES]


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16).to(p.dtype)


def train(optimizer, parameters, steps):
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()
    return parameters


class Exact(Float32Step):
    """Keeps float32 values beside the weight, so that nothing but the stepping itself can make a difference."""

    def _load(self, values, weights):
        self.kept = getattr(self, "kept", {})
        for weight, value in zip(weights, values.parts, strict=True):
            value.copy_(self.kept.get((weight.data_ptr(), weight.numel()), weight))

    def _store(self, values, weights, scratch, generator):
        for weight, value in zip(weights, values.parts, strict=True):
            self.kept[weight.data_ptr(), weight.numel()] = value.clone()
            weight.copy_(value)


MORE = {
    **CASES,
    "SGD-plain": (torch.optim.SGD, {"lr": 1e-2}),
    "SGD-nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "AdamW-foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "AdamW8bit": (bnb.optim.AdamW8bit, {"lr": 1e-2}),
    "AdamW32bit": (bnb.optim.AdamW32bit, {"lr": 1e-2}),
    "Lion8bit": (bnb.optim.Lion8bit, {"lr": 1e-2}),
    "AdEMAMix8bit": (bnb.optim.AdEMAMix8bit, {"lr": 1e-2}),
}


@pytest.mark.parametrize("chunk_elements", [4096, 1 << 20])
@pytest.mark.parametrize("name", MORE)
def test_steps_are_those_of_float32_weights(name, chunk_elements):
    cls, kwargs = MORE[name]
    reference = weights(torch.float32)
    train(cls(reference, **kwargs), reference, range(4))
    ours = weights()
    exact = Exact(cls(ours, **kwargs), chunk_elements)
    train(exact, ours, range(4))
    pieces = 3 if chunk_elements == 4096 and name not in ("Adafactor", "AdEMAMix8bit", "Lion") else 1
    assert sum(numel <= 4096 for _, numel in exact.kept) >= pieces
    for p, expected in zip(ours, reference, strict=True):
        start, stop = p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()
        parts = [v.reshape(-1) for (at, _), v in sorted(exact.kept.items(), key=lambda i: i[0]) if start <= at < stop]
        torch.testing.assert_close(torch.cat(parts), expected.detach().reshape(-1), rtol=1e-6, atol=1e-7)


def test_a_chunk_follows_the_model_unless_it_is_given():
    """The copies of a small model must not hold all of it at once: they would take twice what its weights do."""
    sizes = [100, 1 << 20, 20 << 20, 64 << 20, 1 << 30]
    assert [default_chunk(size) for size in sizes] == [1 << 20, 1 << 20, 20 << 16, 4 << 20, 1 << 24]
    with torch.device("meta"):
        layers = [torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(6)]
    weights = [layer.weight for layer in layers]
    assert Float32Step(torch.optim.AdamW(weights)).chunk_elements == 6 * 2048 * 2048 // 16
    assert Float32Step(torch.optim.AdamW(weights), 5000).chunk_elements == 5000


def test_small_updates_count_where_plain_bfloat16_loses_them():
    plain = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    ours = copy.deepcopy(plain)
    arguments = {"lr": 1e-3, "weight_decay": 0.0}  # half a unit in last place below 1 is 1.95e-3
    optimizers = [
        torch.optim.AdamW([plain], **arguments),
        Float32Step(torch.optim.AdamW([ours], **arguments), 8192),
    ]
    for p, optimizer in zip([plain, ours], optimizers, strict=True):
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert torch.equal(plain, torch.ones_like(plain))
    assert ours.double().mean().item() == pytest.approx(0.95, abs=3e-4)


def converted(convert, cls=torch.optim.AdamW):
    return lambda parameters, lr: convert(cls(parameters, lr=lr))


MADE = {
    "AdamW": torch.optim.AdamW,
    "AdamW8bit": bnb.optim.AdamW8bit,
    "Adafactor": torch.optim.Adafactor,
    "fused": converted(lambda old: exchange(old, "torch.AdamW", {"fused": True})),
    "SGD": converted(lambda old: exchange(old, "torch.SGD", {"fused": True}), torch.optim.SGD),
    "Lion": converted(lambda old: exchange(old, "bitsandbytes.Lion", {"betas": (0.9, 0.99)})),
    "8-bit": converted(to_bitsandbytes),
    "paged": converted(functools.partial(to_bitsandbytes, bits=32, paged=True)),
}


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", MADE)
def test_resume_is_bitwise(name):
    cls = MADE[name]
    straight = weights()
    train(Float32Step(cls(straight, lr=1e-2), 4096, seed=3), straight, range(6))
    first = weights()
    optimizer = Float32Step(cls(first, lr=1e-2), 4096, seed=3)
    train(optimizer, first, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = [nn.Parameter(p.detach().clone()) for p in first]
    again = Float32Step(cls(resumed, lr=1e-2), 4096)
    again.load_state_dict(saved)
    train(again, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(resumed, straight, strict=True))


@pytest.mark.parametrize("cls", [torch.optim.AdamW, functools.partial(torch.optim.AdamW, fused=True), bnb.optim.AdamW])
@pytest.mark.parametrize("chunk_elements", [4096, 1 << 20])
def test_states_of_another_memory_format_keep_their_elements(cls, chunk_elements):
    results, saved = [], None
    for memory_format in (torch.channels_last, torch.channels_last, torch.contiguous_format):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(32, 40, 3, 3).bfloat16().to(memory_format=memory_format))
        bias = nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=memory_format))  # stepped without a copy
        optimizer = Exact(cls([weight, bias], lr=1e-2), chunk_elements)
        if saved is not None:
            optimizer.load_state_dict(copy.deepcopy(saved))
        for step in range(2):
            for p in (weight, bias):
                gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                p.grad = gradient.to(p.dtype, memory_format=torch.contiguous_format)
            optimizer.step()
        saved = saved or optimizer.state_dict()
        results.append((weight.detach(), bias.detach()))
    for result, expected in zip(results[2], results[1], strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-2 if result.dtype is torch.bfloat16 else 1e-5, atol=1e-6)


def test_other_checkpoints_are_refused():
    ours = weights()
    plain = torch.optim.AdamW(ours)
    train(plain, ours, range(1))
    with pytest.raises(ValueError, match="written without StochasticRounding"):
        Float32Step(torch.optim.AdamW(ours)).load_state_dict(plain.state_dict())


def test_it_is_an_optimizer_without_being_asked():
    """Lightning asks `isinstance` of a protocol, which from Python 3.12 on doesn't call `__getattr__`."""
    optimizer = Float32Step(torch.optim.SGD(weights(), lr=1e-2, momentum=0.5))
    for name in Optimizable.__annotations__:
        inspect.getattr_static(optimizer, name)
    assert isinstance(optimizer, Optimizable)
    assert optimizer.defaults is optimizer.wrapped.defaults
    optimizer.defaults = {"lr": 1.0}
    assert optimizer.wrapped.defaults == {"lr": 1.0}


@pytest.mark.parametrize(("kwargs", "factor"), [({"fused": True}, 9), ({"foreach": True}, 16)])
def test_scratch_memory_is_bounded(kwargs, factor):
    ours = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (100_000, 30_000, 30_000, 500, 700)]
    chunk = 16_384
    optimizer = Float32Step(torch.optim.AdamW(ours, **kwargs), chunk)
    train(optimizer, ours, range(1))
    give_gradients(ours, 1)
    with StorageLedger() as ledger:
        for p in ours:
            ledger.track(p, "parameter")
            ledger.track(p.grad, "gradient")
        ledger.track_optimizer(optimizer)
        before = ledger.live_bytes
        optimizer.step()
    ledger.close()
    assert 8 * chunk * 0.8 < ledger.peak_bytes - before <= factor * chunk * 1.02


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.optim.LBFGS(weights()), "LBFGS.*which stepping bfloat16 weights in float32"),
        (lambda: torch.optim.Adagrad(weights()), "Adagrad"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        Float32Step(make())


def test_parts_of_paged_states_are_marked_as_paged():
    parameter = nn.Parameter(torch.zeros(3, 1024, dtype=torch.bfloat16))
    parameter.grad = torch.zeros_like(parameter)
    states = {"state1": torch.zeros(3, 1024, dtype=torch.uint8), "absmax1": torch.zeros(12), "step": torch.zeros(())}
    for name in ("state1", "absmax1"):
        states[name].is_paged, states[name].page_deviceid = True, 2
    for piece in pieces_of(parameter, 0, states, 1024):
        parts = piece.state
        assert [getattr(parts[name], "is_paged", False) for name in states] == [True, True, False]
        assert parts["state1"].page_deviceid == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cls", [bnb.optim.AdamW8bit, bnb.optim.AdamW])
def test_paged_states_are_stepped_in_parts_on_cuda(cls):
    """bitsandbytes pages states of 100,000 elements and more."""
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(512, 512).bfloat16().cuda())
        optimizer = Float32Step(cls([weight], lr=1e-2, is_paged=paged), 1 << 16)
        for step in range(3):
            weight.grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(step)).bfloat16().cuda()
            optimizer.step()
        assert getattr(optimizer.state[weight]["state1"], "is_paged", False) is paged
        results.append(weight.detach().clone())
    assert torch.equal(*results)
