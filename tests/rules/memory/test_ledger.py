"""The ledger on a real GPT-2 step: exact states by arithmetic, total against torch's own allocation events."""

import gc

import bitsandbytes
import pytest
import torch

from lightning_memfit.memory import Category
from lightning_memfit.memory.host import keep_on_host
from lightning_memfit.memory.ledger import StorageLedger, state_tensors


@pytest.fixture
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=3, n_head=4))
    model.config.use_cache = False
    return model


def step(model, optimizer, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def parameter_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_states_of_a_gpt2_step_are_exact(gpt2):
    tokens = torch.randint(0, 512, (2, 64))
    optimizer = torch.optim.AdamW(gpt2.parameters())
    ledger = StorageLedger()
    ledger.track_module(gpt2)
    ledger.track_optimizer(optimizer)
    ledger.track(tokens, Category.INPUT)
    with ledger:
        step(gpt2, optimizer, tokens)
    gc.collect()
    expected = parameter_bytes(gpt2)
    num_tensors = len(list(gpt2.parameters()))
    assert ledger.live_by_category[Category.PARAMETER] == expected
    assert ledger.live_by_category[Category.GRADIENT] == expected
    assert ledger.live_by_category[Category.OPTIMIZER_STATE] == 2 * expected + 4 * num_tensors  # AdamW's step counters
    assert ledger.live_by_category[Category.ACTIVATION] == 0
    assert ledger.live_by_category[Category.TEMPORARY] == 0
    assert ledger.live_bytes == sum(ledger.live_by_category.values())
    assert ledger.peak_bytes == sum(ledger.peak_by_category.values())


def test_peak_equals_the_profilers_allocation_events(gpt2):
    tokens = torch.randint(0, 512, (4, 64))
    optimizer = torch.optim.AdamW(gpt2.parameters())
    ledger = StorageLedger()
    ledger.track_module(gpt2)
    ledger.track_optimizer(optimizer)
    before = ledger.live_bytes
    with torch.profiler.profile(profile_memory=True) as profiler, ledger:
        for _ in range(2):
            step(gpt2, optimizer, tokens)
    live = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert ledger.peak_bytes - before == pytest.approx(peak, rel=0.01)
    assert peak > 0


def test_tensors_without_memory_do_not_count():
    """Zeros of forward-mode differentiation hold none, and results are worked out on `meta` tensors."""
    layer, x = torch.nn.Linear(256, 256), torch.ones(2, 256)
    ledger = StorageLedger()
    ledger.track_module(layer)
    with ledger:
        _, slope = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
        shape = torch.ones(1 << 20, device="meta") * 2
    assert shape.is_meta
    assert slope.nbytes <= ledger.peak_bytes - parameter_bytes(layer) <= 10 * x.nbytes


def test_autocast_copies_of_weights_are_temporaries():
    layer = torch.nn.Linear(64, 64)
    ledger = StorageLedger()
    ledger.track_module(layer)
    with ledger, torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(4, 64)).sum()
        assert ledger.live_by_category[Category.TEMPORARY] >= 64 * 64 * 2


def test_sizes_are_rounded_and_resizes_followed():
    ledger = StorageLedger(rounding_bytes=512)
    with ledger:
        tensor = torch.empty(1)
        assert ledger.live_bytes == 512
        tensor.resize_(1024)
        assert ledger.live_bytes == 4096
        view = tensor[:2]
        del tensor
        assert ledger.live_bytes == 4096
        del view
    assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 4096


def test_wrapper_tensors_count_what_they_hold():
    from torch.testing._internal.two_tensor import TwoTensor

    ledger = StorageLedger()
    wrapped = TwoTensor(torch.zeros(8), torch.zeros(8))
    ledger.track(wrapped, Category.PARAMETER)
    assert ledger.live_by_category[Category.PARAMETER] == 64
    with ledger:
        product = wrapped * 2
        assert ledger.live_by_category[Category.ACTIVATION] == 64
        del product
    assert ledger.live_bytes == 64


def test_other_devices_are_left_out():
    ledger = StorageLedger(device_type="cuda")
    with ledger:
        kept = torch.zeros(8)
    ledger.track(kept, Category.INPUT)
    assert ledger.live_bytes == 0


def test_close_removes_every_hook():
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    ledger = StorageLedger()
    ledger.track_module(layer)
    ledger.track_optimizer(optimizer)
    ledger.close()
    layer(torch.randn(1, 4)).sum().backward()
    optimizer.step()
    assert ledger.live_by_category[Category.GRADIENT] == 0
    assert ledger.live_by_category[Category.OPTIMIZER_STATE] == 0


def test_rounding_must_be_positive():
    with pytest.raises(ValueError, match="rounding_bytes=0"):
        StorageLedger(rounding_bytes=0)


def test_states_made_at_the_peak_are_labelled_in_the_peak_too():
    layer = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    ledger = StorageLedger()
    ledger.track_module(layer)
    ledger.track_optimizer(optimizer)
    with ledger:
        layer(torch.zeros(1, 64)).sum().backward()
        optimizer.step()
    size = 64 * 64 * 4
    assert ledger.peak_by_category[Category.OPTIMIZER_STATE] == size
    assert ledger.peak_by_category[Category.GRADIENT] == size
    assert ledger.peak_bytes == sum(ledger.peak_by_category.values())


def test_what_a_step_makes_of_host_memory_is_left_out():
    master = torch.nn.Parameter(torch.ones(1024))
    keep_on_host(master, Category.PARAMETER)
    master.grad = torch.ones_like(master)
    optimizer = torch.optim.AdamW([master], fused=True)
    ledger = StorageLedger()
    ledger.track_optimizer(optimizer)
    with ledger:
        optimizer.step()
        moved = master.detach().clone()
    assert ledger.peak_bytes <= moved.nbytes + 8  # `step`, a scalar that is made of nothing


def stepped(python_kernels):
    """Weights after two 8-bit steps, and the steps' peak over what was alive before the last."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 1 << 14))
    optimizer = bitsandbytes.optim.AdamW8bit([weight], min_8bit_size=1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    ledger = StorageLedger(python_kernels=python_kernels)
    for tensor in (weight, weight.grad, *optimizer.name2qmap.values(), *optimizer.state[weight].values()):
        if isinstance(tensor, torch.Tensor):
            ledger.track(tensor, Category.PARAMETER)
    before = ledger.live_bytes
    with ledger:
        optimizer.step()
    assert ledger.live_bytes == before
    return weight.detach(), ledger.peak_bytes - before


def test_a_ledger_sees_what_a_step_dequantizes_and_changes_no_number():
    seen, peak = stepped(True)
    unseen, hidden = stepped(False)
    assert torch.equal(seen, unseen)
    assert peak >= hidden + 3 * seen.nbytes  # both moments and the weight in fp32


def test_states_in_containers_of_an_optimizer_are_states():
    """SOAP and Shampoo keep lists of factors, LBFGS those of its last steps."""
    weight = torch.nn.Parameter(torch.ones(256))
    optimizer = torch.optim.SGD([weight], 0.1)
    with StorageLedger() as ledger:
        ledger.track_optimizer(optimizer)
        weight.grad = torch.ones(256)
        factors = [torch.zeros(256), {"inner": (torch.zeros(256),)}]
        optimizer.state[weight]["factors"], optimizer.state["of all"] = factors, torch.zeros(256)
        optimizer.step()
        assert ledger.live_by_category[Category.OPTIMIZER_STATE] == 3 * 256 * 4
    ledger.close()
    assert [owner is weight for owner, _ in state_tensors(optimizer)] == [True, True, False]
