"""Where code that communicates says so beforehand, and who wants to know."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from typing_extensions import override

_listeners: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> Callable[[], None]:
    """Call a function before every collective that is announced in this process.

    Args:
        listener: The function. What it raises keeps the collective from being done.

    Returns:
        A function that ends this.
    """
    _listeners.append(listener)

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


def announce() -> None:
    """Say that a collective of this module's own follows, with nothing in between that may fail."""
    for listener in _listeners:
        listener()


def announce_in_backward(tensor: Tensor) -> Tensor:
    """Return the same tensor, whose backward says that a collective follows."""
    announced: Tensor = _Announcing.apply(tensor)  # type: ignore[no-untyped-call]
    return announced


class _Announcing(Function):
    @override
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @override
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        announce()
        return grads[0]
