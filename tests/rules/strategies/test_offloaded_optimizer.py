import torch
from torch import nn

from lightning_memfit.strategies.zero import prefer_fused


def parameters():
    return [nn.Parameter(torch.ones(3))]


def test_plain_adam_becomes_fused_and_steps_alike():
    fused, plain = (torch.optim.AdamW(parameters(), lr=0.1) for _ in range(2))
    assert prefer_fused(fused)
    for optimizer in (fused, plain):
        for _ in range(3):
            optimizer.param_groups[0]["params"][0].grad = torch.tensor([1.0, -2.0, 3.0])
            optimizer.step()
    pair = [optimizer.param_groups[0]["params"][0] for optimizer in (fused, plain)]
    assert torch.allclose(*pair, rtol=1e-6)
    assert fused.param_groups[0]["fused"] is True


def test_other_optimizers_and_other_wishes_stay():
    assert not prefer_fused(torch.optim.SGD(parameters(), lr=0.1))
    assert not prefer_fused(torch.optim.AdamW(parameters(), lr=0.1, foreach=True))
    assert not prefer_fused(torch.optim.AdamW(parameters(), lr=0.1, fused=False))
