"""Measure what a device reaches: operators of each kind, the host link, and what issuing an operator costs.

`memfit doctor --measure` keeps the figures for later plans (`planner.rates`). An operator takes `f / F + b / B` with
its FLOPs and bytes; `B` comes from elementwise operators, `F` from one large enough. Operands and results are other
tensors in every run, more of them than caches hold: a training step meets its weights and activations once per pass.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_memfit.memory.kind import CPU, CUDA, DeviceKind
from lightning_memfit.planner.rates import Measured, seconds_of
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.core.step_cost import cpu_seconds

_CACHES = 1 << 28
"""Bytes of operands and results that no cache holds."""
_EACH_S = 0.5
"""Seconds for which each figure is measured."""

Run = Callable[[Tensor], object]


def measure(device: torch.device) -> Measured:
    """Measure a device and its host, in 10 to 20 seconds.

    Args:
        device: Where operators run.
    """
    large = DeviceKind.of(device).has_own_memory
    return Measured(
        _operators(device, large),
        _launch_seconds(device),
        _host_seconds() * torch.get_num_threads() / cpu_seconds("adamw"),
        _link_rate(device) if large else None,
    )


def _operators(device: torch.device, large: bool) -> dict[str, float]:
    """Bytes or FLOPs per second by kind of operator."""
    elements = (1 << 26) if large else (1 << 18)
    rows = torch.randn(elements // 64, 64, device=device)
    places = torch.arange(len(rows), device=device)
    moving: dict[str, Run] = {
        "elementwise": lambda x: x * 2.0,
        "function": functional.gelu,
        "indexing": lambda x: functional.embedding(places, x),
    }
    rates = {kind: 2 * rows.nbytes / _in_turns(run, rows) for kind, run in moving.items()}
    for dtype in (torch.float32, torch.bfloat16, *((torch.float16,) if large else ())):
        for kind, (run, given, flops) in _multiplying(dtype, device, large).items():
            moved = 3 * given.nbytes / rates["elementwise"]
            name = f"{kind} {str(dtype).removeprefix('torch.')}"
            rates[name] = flops / max(1e-9, _in_turns(run, given) - moved)
    return rates


def _multiplying(dtype: torch.dtype, device: torch.device, large: bool) -> dict[str, tuple[Run, Tensor, float]]:
    """What runs operators of a kind, on what, and their FLOPs; a backward pass has twice or 2.5 times the forward's."""
    width, heads, length, side = (4096, 64, 2048, 64) if large else (512, 16, 256, 16)
    made: dict[str, Any] = {"dtype": dtype, "device": device}
    left, right = (torch.randn(width, width, **made) for _ in range(2))
    query = torch.randn(1, heads, length, 64, **made)
    images, layer = torch.randn(16, 64, side, side, **made), nn.Conv2d(64, 64, 3, padding=1, **made)
    return {
        "product": (lambda x: left @ x, right, 2.0 * width**3),
        "attention": (
            _with_backward(lambda x: functional.scaled_dot_product_attention(x, x, x)),
            query,
            3.5 * 4 * heads * length**2 * 64,
        ),
        "convolution": (_with_backward(layer), images, 3 * 2.0 * 16 * side**2 * 9 * 64**2),
    }


def _with_backward(forward: Callable[[Tensor], Tensor]) -> Run:
    def run(given: Tensor) -> object:
        leaf = given.detach().requires_grad_()
        result = forward(leaf)
        result.backward(torch.ones_like(result))
        return leaf.grad

    return run


def _in_turns(run: Run, given: Tensor) -> float:
    """Seconds of a run on one of many tensors after another, whose result is kept until its turn comes again."""
    copies = [given.clone() for _ in range(max(2, _CACHES // (2 * given.nbytes)))]
    results, turn = dict[int, object](), count()

    def next_one() -> None:
        at = next(turn) % len(copies)
        results[at] = run(copies[at])

    return seconds_of(next_one, _EACH_S)


class _Small(pl.LightningModule):
    """Issues operators that compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))]
        self.layers = nn.Sequential(*layers)

    @override
    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def _launch_seconds(device: torch.device) -> float:
    """Seconds of issuing an operator of a training step: forward and backward of a module too small to compute."""
    module, batch = _Small(), torch.ones(2, 8)
    emulation = Emulation(CUDA if DeviceKind.of(device).has_own_memory else CPU)
    work = profile_module(module, batch, emulation=emulation, any_micro_batch=False).work
    module, batch = module.to(device), batch.to(device)
    taken = seconds_of(lambda: module.training_step(batch).backward(), _EACH_S)
    return taken / sum(row.times for phase in ("forward", "backward") for row in work[phase])


def _host_seconds() -> float:
    """Seconds per parameter of a step of AdamW on this host."""
    weights = [nn.Parameter(torch.ones(1 << 20)) for _ in range(16)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, foreach=False)
    return seconds_of(optimizer.step, _EACH_S) / sum(weight.numel() for weight in weights)


def _link_rate(device: torch.device) -> float:
    there, here = torch.empty(1 << 28, dtype=torch.uint8, device=device), torch.empty(1 << 28, dtype=torch.uint8)
    here = here.pin_memory()
    return there.nbytes / seconds_of(lambda: here.copy_(there, non_blocking=True), _EACH_S)
