"""Parts of a weight and of its optimizer states, which an elementwise optimizer can step one after the other."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_BLOCK_SIZE = 256  # elements that share one scale in bitsandbytes' 8-bit states
_PER_BLOCK = "absmax"
_ELEMENTWISE = {
    "torch.optim": ("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    "bitsandbytes.optim": ("Adam", "AdamW", "Lion", "RMSprop", "SGD"),
}


def can_be_cut(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether an optimizer's update of an element depends on that element's gradient and state alone."""
    cls = type(optimizer)
    stem = cls.__name__.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
    return parameter.is_contiguous() and any(
        cls.__module__.startswith(f"{library}.") and stem in names for library, names in _ELEMENTWISE.items()
    )


def pieces_of(parameter: Tensor, group: int, state: dict[str, Any], limit: int) -> "Iterator[Piece]":
    """Cut a weight into pieces of about equal length, at most `limit` rounded up to a multiple of 256 elements.

    Args:
        parameter: Weight with a gradient; contiguous if it is larger than `limit`.
        group: Index of its parameter group.
        state: Its optimizer state as it is before the step.
        limit: Elements per piece.
    """
    total = parameter.numel()
    if total <= limit:
        yield Piece(parameter, group, state, None)
        return
    before = dict(state)
    length = -(-total // -(-total // limit))
    length = -(-length // _BLOCK_SIZE) * _BLOCK_SIZE
    for start in range(0, total, length):
        yield Piece(parameter, group, before, slice(start, min(start + length, total)))


class Piece:
    """A weight, or the part of it that `span` cuts out of its flat form."""

    def __init__(self, parameter: Tensor, group: int, before: dict[str, Any], span: slice | None) -> None:
        self.parameter = parameter
        self.group = group
        self._before = before
        self._span = span
        self._views: dict[str, Any] = {}

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return self.parameter.numel() if self._span is None else self._span.stop - self._span.start

    def weight(self) -> Tensor:
        """View of the weight."""
        return self._cut(self.parameter.detach())

    def gradient(self) -> Tensor:
        """Part of the gradient."""
        assert self.parameter.grad is not None
        gradient = self.parameter.grad
        return gradient if self._span is None else gradient.reshape(-1)[self._span]

    def state(self) -> dict[str, Any]:
        """The optimizer state before the step: views where there is a value per element or per block, else copies."""
        self._views = {key: self._part(key, value) for key, value in self._before.items()}
        return dict(self._views)

    def keep(self, state: dict[str, Any], whole: MutableMapping[str, Any]) -> None:
        """Write what the step made of `state()` into the weight's own state."""
        for key, value in state.items():
            if not self._is_part(key, value):
                whole[key] = value
            elif value is not self._views.get(key):
                if key not in whole:
                    whole[key] = torch.empty_like(self.parameter, dtype=value.dtype)
                self._cut(whole[key]).copy_(value)

    def _cut(self, tensor: Tensor) -> Tensor:
        return tensor if self._span is None else tensor.view(-1)[self._span]

    def _part(self, key: str, value: Any) -> Any:
        if self._span is None or not isinstance(value, Tensor):
            return value
        if value.shape == self.parameter.shape:
            return self._cut(value)
        if key.startswith(_PER_BLOCK):
            return value[self._span.start // _BLOCK_SIZE : -(-self._span.stop // _BLOCK_SIZE)]
        return value.clone() if value.dim() == 0 else value

    def _is_part(self, key: str, value: Any) -> bool:
        if self._span is None or not isinstance(value, Tensor):
            return False
        return value.shape == (self.num_elements,) or key.startswith(_PER_BLOCK)
