"""Optimizers to convert, shared by the tests of this folder."""

import bitsandbytes
import torch

CASES = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}),
    "AdamW-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.8, "weight_decay": 0.1}),
    "Lion": (bitsandbytes.optim.Lion, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
}


def check_states(optimizer):
    """States have the promised width, shape and number of scales."""
    for parameter, state in optimizer.state.items():
        if not parameter.numel():
            continue
        bits = optimizer.bits_of(parameter)
        for key in {"state1", "state2"} & state.keys():
            assert state[key].dtype is (torch.uint8 if bits == 8 else torch.float32)
            assert not state[key].numel() % parameter.numel()
            if bits == 8:
                scales = -(-parameter.numel() // 256) * (state[key].numel() // parameter.numel())
                assert state[key.replace("state", "absmax")].numel() == scales
