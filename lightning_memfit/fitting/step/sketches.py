"""Random projections of gradients, by which passes are compared without copies of gradients."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.memory.comparison import CHUNK, NUM_PROJECTIONS, projected, signs
from lightning_memfit.reliability.upstream.deepspeed import held_weight

_MOVED = 0.01


def move_weights(module: nn.Module) -> None:
    """Move every trained weight by about one per cent of its size: heads and adapters that are zero take part then."""
    with torch.no_grad(), _disable_current_modes():
        for parameter in module.parameters():
            data = held_weight(parameter).data
            if not parameter.requires_grad or not data.is_floating_point() or type(data) is not Tensor:
                continue
            values = data.view(-1) if data.is_contiguous() else data.flatten()[:0]
            scale = _MOVED * float(values.float().std()) if values.numel() > 1 else 0.0
            for chunk in values.split(CHUNK):
                chunk.add_(signs(chunk.device)[: len(chunk)], alpha=scale or _MOVED)


class Sketches:
    """Random projections of gradients, read as they are made: some techniques free them at once."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._rows: dict[int, Tensor] = {}
        self._handles = [p.register_hook(self._hook(index)) for index, p in enumerate(self._parameters)]

    def _hook(self, index: int) -> Any:
        def add(gradient: Tensor) -> None:
            found = projected(gradient)
            self._rows[index] = self._rows[index] + found if index in self._rows else found

        return add

    def remove(self) -> None:
        """Read gradients no more."""
        for handle in self._handles:
            handle.remove()

    def matrix(self, loss: float) -> Tensor:
        """Return the projections, (parameters + 1, projections) in float64 on the CPU; the last row is the loss."""
        rows = []
        for index, parameter in enumerate(self._parameters):
            # What hooks left of it, unless it was freed at once, as some techniques do.
            found = self._rows.get(index) if parameter.grad is None else projected(parameter.grad)
            rows.append(torch.zeros(NUM_PROJECTIONS, dtype=torch.float64) if found is None else found)
        last = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64)
        last[0] = loss
        return torch.stack([*rows, last])
