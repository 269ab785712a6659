"""Random projections of gradients, by which passes are compared without copies of gradients.

A count sketch: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.reliability.upstream.deepspeed import held_weight

_NUM_PROJECTIONS = 32
_CHUNK = 1 << 18
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
            for chunk in values.split(_CHUNK):
                chunk.add_(_signs(chunk.device)[: len(chunk)], alpha=scale or _MOVED)


class Sketches:
    """Random projections of the gradients of a backward pass.

    Args:
        module: The module; its gradients are read as they are made, for some techniques free them at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._rows: dict[int, Tensor] = {}
        self._handles = [p.register_hook(self._hook(index)) for index, p in enumerate(self._parameters)]

    def _hook(self, index: int) -> Any:
        def add(gradient: Tensor) -> None:
            found = _project(gradient)
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
            found = self._rows.get(index) if parameter.grad is None else _project(parameter.grad)
            rows.append(torch.zeros(_NUM_PROJECTIONS, dtype=torch.float64) if found is None else found.cpu().double())
        last = torch.zeros(_NUM_PROJECTIONS, dtype=torch.float64)
        last[0] = loss
        return torch.stack([*rows, last])


def _project(gradient: Tensor) -> Tensor:
    """Return random projections of a gradient, in float64 where the device has it."""
    with torch.no_grad(), _disable_current_modes():
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        wide = torch.float32 if gradient.device.type == "mps" else torch.float64
        total = torch.zeros(_NUM_PROJECTIONS, dtype=wide, device=gradient.device)
        for index, chunk in enumerate(gradient.reshape(-1).split(_CHUNK)):
            signed = chunk.to(wide) * _signs(gradient.device)[: len(chunk)]
            padded = nn.functional.pad(signed, (0, -len(chunk) % _NUM_PROJECTIONS))
            total += (1 if index.bit_count() % 2 else -1) * padded.view(-1, _NUM_PROJECTIONS).sum(0)
        return total


_SIGNS: dict[torch.device, Tensor] = {}


def forget_signs() -> None:
    """Free the signs, which every comparison makes again."""
    _SIGNS.clear()


def _signs(device: torch.device) -> Tensor:
    if device not in _SIGNS:
        generator = torch.Generator().manual_seed(0)
        values = torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
        _SIGNS[device] = values.to(device)
    return _SIGNS[device]
