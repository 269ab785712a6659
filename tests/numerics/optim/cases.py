"""Optimizers to convert, shared by the tests of this folder."""

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al., 2023, arXiv 2302.06675, algorithm 2: what any class called Lion computes."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(momentum.lerp(p.grad, 1 - group["betas"][0]).sign(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - group["betas"][1])


CASES = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}),
    "AdamW-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.8, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "alpha": 0.9, "weight_decay": 0.1}),
    "Lion": (Lion, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
}
