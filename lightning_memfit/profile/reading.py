"""Let Python code read fake tensors as numbers: `tensor.numpy()` and `torch.tensor([tensor, ...])`.

Both read memory past torch's dispatcher. What they read is what `.item()` would: the real values of integers, assumed
ones of everything else. Written for torch 2.9-2.13; `tests/unit/profile/test_reading.py` fails when they move.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memfit.profile.fake import replaced
from lightning_memfit.profile.integers import RealIntegers


@contextmanager
def readable_fakes(integers: RealIntegers) -> Iterator[None]:
    """Patch torch while active.

    Args:
        integers: Knows the real values, and records what is assumed.
    """

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return integers.read(self)

    with ExitStack() as stack:
        stack.enter_context(replaced(FakeTensor, "numpy", numpy))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(replaced(torch, name, _reading(getattr(torch, name))))
        yield


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory that reads fakes inside lists as numbers."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, (list, tuple)) and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(data)):
            data = tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, FakeTensor) else leaf, data)
        return function(data, *args, **kwargs)

    return make
