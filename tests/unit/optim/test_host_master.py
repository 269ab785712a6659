import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

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


def test_exact_values_become_masters_without_a_copy():
    exact = model(dtype=torch.float32)
    net = model()
    values = {p: e.detach() for p, e in zip(net.parameters(), exact.parameters(), strict=True)}
    host = HostMaster(torch.optim.SGD(net.parameters(), lr=0.1), values)
    for p, value in values.items():
        assert host.master_of(p).data_ptr() == value.data_ptr()


@pytest.mark.parametrize("keep_masters", [False, True])
def test_removing_gives_the_optimizer_its_weights_and_states_back(keep_masters):
    net = model()
    weights = list(net.parameters())
    optimizer = torch.optim.AdamW([{"params": weights[:2]}, {"params": weights[2:], "lr": 1.0}])
    host = HostMaster(optimizer)
    backward(net, 0)
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg"] for group in optimizer.param_groups for p in group["params"]]
    masters = [host.master_of(p).clone() for p in weights]
    host.remove(keep_masters)
    host.remove(keep_masters)
    for p, master in zip(weights, masters, strict=True):
        assert torch.equal(p, master if keep_masters else master.to(torch.bfloat16))
    assert [p for group in optimizer.param_groups for p in group["params"]] == weights
    assert all(optimizer.state[p]["exp_avg"] is moment for p, moment in zip(weights, moments, strict=True))
    net(inputs(1).to(weights[0].dtype)).sum().backward()
    assert all(p.grad is not None for p in weights)


def test_weights_without_gradients_and_of_other_dtypes():
    net = model()
    wide, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    optimizer = torch.optim.AdamW([*net[0].parameters(), *net[2].parameters(), wide, frozen])
    host = HostMaster(optimizer)
    assert host.num_parameters == 5
    assert host.master_of(wide) is None
    untouched = net[2].weight.detach().clone()
    net[0](inputs(0)).sum().backward()
    wide.sum().backward()
    optimizer.step()
    assert torch.equal(net[2].weight, untouched)
    assert not torch.equal(wide, torch.ones(3))


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [({}, True), ({"fused": False}, False), ({"foreach": True}, None), ({"lr": torch.tensor(0.1)}, None)],
)
def test_fused_kernel_where_nothing_was_chosen(kwargs, expected):
    optimizer = torch.optim.AdamW(model().parameters(), **kwargs)
    HostMaster(optimizer)
    assert optimizer.param_groups[0]["fused"] is expected


def test_refusals():
    with pytest.raises(ValueError, match="no weight of bfloat16"):
        HostMaster(torch.optim.SGD(model(dtype=torch.float32).parameters(), lr=0.1))
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    backward(net, 0)
    optimizer.step()
    with pytest.raises(ValueError, match="states already"):
        HostMaster(optimizer)
