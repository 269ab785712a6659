"""Going back to the start of an effective batch after a failed attempt."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memfit.fitting.host import HostCopy
from lightning_memfit.fitting.metrics import StepMetrics
from lightning_memfit.fitting.random_state import RandomState


class MutableBuffers:
    """Buffers that a forward pass changes (running statistics, counters), saved before each step.

    Which those are is learned: the first `save` copies all, later ones only what has changed before. A buffer that
    changes for the first time in a step that fails keeps the change.

    Args:
        module: Where the buffers are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = [(child, name) for child in module.modules() for name in child._buffers]
        self._watched: list[tuple[nn.Module, str]] = self._slots
        self._seen: list[tuple[int, int]] | None = None

    def save(self) -> list[tuple[nn.Module, str, Tensor, HostCopy]]:
        """Copies of the buffers that change."""
        if not self._slots:
            return []
        self._learn()
        return [
            (child, name, buffer, HostCopy(buffer))
            for child, name in self._watched
            if (buffer := child._buffers[name]) is not None
        ]

    @staticmethod
    def load(saved: list[tuple[nn.Module, str, Tensor, HostCopy]]) -> None:
        """Put the buffers back."""
        for child, name, buffer, copy in saved:
            copy.restore(buffer)
            child._buffers[name] = buffer

    def _learn(self) -> None:
        now = [_identity(child._buffers[name]) for child, name in self._slots]
        if self._seen is not None:
            known = set(self._watched) if self._watched is not self._slots else set()
            known |= {slot for slot, before, after in zip(self._slots, self._seen, now, strict=True) if before != after}
            self._watched = [slot for slot in self._slots if slot in known]
        self._seen = now


def _identity(buffer: Tensor | None) -> tuple[int, int]:
    return (0, 0) if buffer is None else (id(buffer), buffer._version)


@dataclass
class RewindPoint:
    """State at the start of a loader batch."""

    random: RandomState
    metrics: list[dict[str, Any]]
    buffers: list[Any]
    hook_name: str | None


class Rewind:
    """Save what forward and backward change, and put it back.

    Args:
        module: The module in training.
        metrics: Its metrics.
        device: The device in use.
    """

    def __init__(self, module: nn.Module, metrics: StepMetrics, device: torch.device) -> None:
        self._module = module
        self._parameters = list(module.parameters())
        self._metrics = metrics
        self._device = device
        self._buffers = MutableBuffers(module)
        self._kept_zeros: list[nn.Parameter] = []

    def save(self) -> RewindPoint:
        """Save the state before a loader batch. Gradients need none: an effective batch starts without."""
        hook_name = getattr(self._module, "_current_fx_name", None)
        return RewindPoint(RandomState(self._device), self._metrics.save(), self._buffers.save(), hook_name)

    def load(self, point: RewindPoint) -> None:
        """Go back to a loader batch's start, gradients aside."""
        point.random.restore()
        self._metrics.load(point.metrics)
        self._buffers.load(point.buffers)

    def remember_zeros(self) -> None:
        """Remember which gradients `zero_grad` left as zeros instead of None."""
        self._kept_zeros = [parameter for parameter in self._parameters if parameter.grad is not None]

    def clear_gradients(self) -> None:
        """Set the gradients to what `zero_grad` made of them."""
        kept = {id(parameter) for parameter in self._kept_zeros}
        for parameter in self._parameters:
            if parameter.grad is not None and id(parameter) in kept:
                parameter.grad.zero_()
            else:
                parameter.grad = None
