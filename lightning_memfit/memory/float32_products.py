"""In which precision products of float32 matrices and convolutions are computed.

torch has two interfaces for it: `torch.set_float32_matmul_precision` and `allow_tf32`, and since 2.9 `fp32_precision`
of every backend. Where the second was used and the two disagree, the first can't be read: torch raises a
`RuntimeError`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Switch:
    """One setting of the first interface, and what it stands for in the second."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    exact: Any
    backends: tuple[Any, ...]

    def kept(self) -> Callable[[], None]:
        """A function that sets it to what it is now, by the interface that it was set by."""
        try:
            value = self.read()
        except RuntimeError:
            values = [backend.fp32_precision for backend in self.backends]
            return lambda: self._set_each(values)
        return lambda: self.write(value)

    def make_exact(self) -> None:
        """Compute in float32."""
        try:
            self.read()
        except RuntimeError:
            self._set_each(["ieee"] * len(self.backends))
        else:
            self.write(self.exact)

    def _set_each(self, values: list[Any]) -> None:
        for backend, value in zip(self.backends, values, strict=True):
            backend.fp32_precision = value


def _allow_in_cudnn(allow: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allow


_BACKENDS: Any = torch.backends  # whose newer settings have no types
_PRODUCTS = _Switch(
    torch.get_float32_matmul_precision,
    torch.set_float32_matmul_precision,
    "highest",
    (_BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul),
)
_CONVOLUTIONS = _Switch(
    lambda: torch.backends.cudnn.allow_tf32, _allow_in_cudnn, False, (_BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn)
)


@contextmanager
def exact_products() -> Iterator[None]:
    """In this context, products and convolutions of float32 are computed in float32."""
    restore = [switch.kept() for switch in (_PRODUCTS, _CONVOLUTIONS)]
    for switch in (_PRODUCTS, _CONVOLUTIONS):
        switch.make_exact()
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def products_kept() -> Callable[[], None]:
    """A function that sets the precision of products to what it is now."""
    return _PRODUCTS.kept()


def precision_on_cuda() -> str:
    """How products of float32 are computed on CUDA: `ieee`, `tf32`, or `none`, which is torch's default (`ieee`)."""
    return str(_BACKENDS.cuda.matmul.fp32_precision)


def precisions_on_host() -> tuple[str, ...]:
    """How oneDNN computes products, convolutions and recurrent layers of float32."""
    host = _BACKENDS.mkldnn
    return tuple(str(one.fp32_precision) for one in (host.matmul, host.conv, host.rnn))
