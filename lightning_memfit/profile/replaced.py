"""Attributes of other packages, replaced for the time of a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._device import _device_constructors


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a class or module for a while."""
    keep_constructors()
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def keep_constructors() -> None:
    """Have torch list the functions that heed `with torch.device(...)` while they are its own.

    It lists them once, as it first needs them. Those that are replaced at that moment would never heed it again: with
    `torch.tensor` among them, transformers doesn't see that it builds a model on the meta device, takes buffers for
    initialized that are not, and `from_pretrained` returns models with whatever was in memory.
    """
    _device_constructors()
