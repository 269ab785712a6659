import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_memfit.optim import host_master
from lightning_memfit.optim.host_master import HostMaster

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def model(device="cpu", dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device, dtype)


def inputs(step, device="cpu"):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)


def backward(net, step, device="cpu"):
    (net(inputs(step, device)).float() ** 2).mean().backward()


def by_hand(device, steps, accumulate, clip):
    """Float32 weights and gradients beside a bfloat16 copy that computes."""
    net = model(device)
    masters = [nn.Parameter(p.detach().float().cpu()) for p in net.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(accumulate):
            net.zero_grad()
            backward(net, step * accumulate + micro_batch, device)
            for p, master in zip(net.parameters(), masters, strict=True):
                gradient = p.grad.float().cpu()
                master.grad = gradient if master.grad is None else master.grad + gradient
        if clip:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for p, master in zip(net.parameters(), masters, strict=True):
                p.copy_(master)
    return masters, list(net.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (3, 0.05)])
def test_same_numbers_as_float32_weights_beside_a_bfloat16_copy(device, accumulate, clip):
    masters, weights = by_hand(device, 5, accumulate, clip)
    net = model(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    host = HostMaster(optimizer)
    for step in range(5):
        for micro_batch in range(accumulate):
            if micro_batch == 0:
                optimizer.zero_grad()
            backward(net, step * accumulate + micro_batch, device)
            assert all(p.grad is None for p in net.parameters())
        if clip:
            with host.shown():
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        schedule.step()
    for p, master, weight in zip(net.parameters(), masters, weights, strict=True):
        assert torch.equal(host.master_of(p), master)
        assert torch.equal(p, weight)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (8, 16), (0,)])
def test_a_single_changed_element_is_found(shape):
    weight = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    other = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight, other], lr=0.1)
    HostMaster(optimizer)
    optimizer.step()
    if weight.numel():
        weight.data.view(-1)[-1] = 2.0
        with pytest.raises(RuntimeError, match="written to by other code"):
            optimizer.step()


def step_with(net, optimizer, host, in_closure, change):
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(len(optimizer.state))).bfloat16()

    def evaluate():
        net(images).float().square().mean().backward()
        host.show()
        net.weight.grad = change(net.weight.grad)

    if in_closure:
        optimizer.step(evaluate)
    else:
        evaluate()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("in_closure", [False, True])
def test_states_and_gradients_of_another_memory_format_keep_their_elements(in_closure):
    """The fused kernel reads memory, not strides. Compared with weights and gradients in the format of the states."""
    last, other = torch.channels_last, torch.contiguous_format
    masters, saved = [], None
    for weights, gradients in ((last, last), (last, last), (other, last), (last, other)):
        torch.manual_seed(0)
        net = nn.Conv2d(3, 8, 3).to(torch.bfloat16, memory_format=weights)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        host = HostMaster(optimizer)
        if saved is not None:
            optimizer.load_state_dict(copy.deepcopy(saved))
        step_with(net, optimizer, host, in_closure, lambda grad, to=gradients: grad.contiguous(memory_format=to))
        saved = saved or optimizer.state_dict()
        masters.append(host.master_of(net.weight))
    for master in masters[2:]:
        torch.testing.assert_close(master, masters[1], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_sent_to_a_busy_device_arrive_in_their_order():
    device = torch.device("cuda", torch.cuda.current_device())
    transfer = host_master._Transfer(device)
    half = torch.zeros(1 << 20, dtype=torch.bfloat16, device=device)
    slot = SimpleNamespace(
        exact=torch.zeros(1 << 20), staging=torch.empty_like(half, device="cpu", pin_memory=True), half=half
    )
    torch.cuda._sleep(500_000_000)
    seen = []
    for value in (1.0, 2.0, 3.0):
        slot.exact.fill_(value)
        transfer.to_device([slot])
        seen.append(half.clone())
    transfer.thread.shutdown()
    assert [(one.min().item(), one.max().item()) for one in seen] == [(1, 1), (2, 2), (3, 3)]
