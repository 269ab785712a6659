"""Frozen linear layers in 4 or 8 bits: those of bitsandbytes, made of layers that a module has already.

In 4 bits weights are NF4 with double quantization (Dettmers et al., 2023, arXiv 2305.14314): blocks of 64 weights share
a scale, and blocks of 256 scales are stored in 8 bits with a common scale. In 8 bits a row shares a scale (Dettmers et
al., 2022, arXiv 2208.07339).

bitsandbytes 0.50 keeps codes in subclasses of Parameter, which can't be made of fake tensors. Here they are plain
parameters, which also follow their module to another device, to other ranks and into copies.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]
from bitsandbytes import nn as upstream
from bitsandbytes.functional import QuantState, create_dynamic_map
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_memfit.adapters.linears import is_conv1d

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Those that the 4-bit kernels know; others, such as float64, are misread without an error and go through float32."""


def quantized(layer: nn.Module, bits: int) -> Any:
    """Return a frozen layer of bitsandbytes, in 4 or 8 bits, with weight and bias of an `nn.Linear` or a `Conv1D`."""
    own: Any = layer
    weight = own.weight.detach()
    made: Any = (Linear4bit if bits == 4 else Linear8bit)(weight.T if is_conv1d(layer) else weight)
    made.bias = own.bias
    made.train(layer.training)
    return made


class Linear4bit(upstream.Linear4bit):  # type: ignore[misc, name-defined]
    """A frozen weight in NF4, which computes in the dtype of autocast, or else in that of its input."""

    def __init__(self, weight: Tensor) -> None:
        """Quantize a weight of shape `(out, in)`."""
        with _disable_current_modes():
            super().__init__(weight.shape[1], weight.shape[0], bias=False, quant_type="nf4", device="meta")
        operators = torch.ops.bitsandbytes
        weight = (weight if weight.dtype in _KERNEL_DTYPES else weight.float()).contiguous()
        table = torch.tensor(_scale_codes(), dtype=torch.float32, device=weight.device)
        codes, scales = operators.quantize_4bit(weight, 64, "nf4", torch.uint8)
        offset = scales.mean()
        small, outer = operators.quantize_blockwise(scales - offset, table, 256)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("absmax", small, persistent=False)
        for name, value in (("outer", outer), ("table", table), ("offset", offset)):
            # As integers with the same bits, which converting the module to half precision leaves alone.
            self.register_buffer(name, value.view(torch.int32), persistent=False)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self.quant_state = None
        applied: nn.Module = super()._apply(fn, recurse)
        return applied

    def _state(self) -> QuantState:
        outer, table, offset = (one.view(torch.float32) for one in (self.outer, self.table, self.offset))
        inner = QuantState(outer, blocksize=256, code=table, dtype=torch.float32)
        shape = torch.Size((self.out_features, self.in_features))
        return QuantState(self.absmax, shape, None, 64, "nf4", torch.float32, offset, inner)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias` for `x` of shape `(..., in)`."""
        x = _autocast(x)
        dtype = x.dtype if x.dtype in _KERNEL_DTYPES else torch.float32
        bias = None if self.bias is None else self.bias.to(dtype)  # upstream converts the parameter itself
        state: Any = self.quant_state or self._state()
        self.quant_state = state
        state.dtype = dtype  # which backward makes of the codes
        product: Tensor = matmul_4bit(x.to(dtype), self.weight, bias=bias, quant_state=state)
        return product.to(x.dtype)


class Linear8bit(upstream.Linear8bitLt):  # type: ignore[misc, name-defined]
    """A frozen weight in 8 bits, with activations as they are.

    Upstream's product keeps the layer's input beside what autograd saves, where checkpointing can't free it.
    """

    scale: Tensor

    def __init__(self, weight: Tensor) -> None:
        """Quantize a weight of shape `(out, in)`."""
        with _disable_current_modes():
            super().__init__(weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False, device="meta")
        codes, largest, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight.contiguous().half())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", largest.mul(1.0 / 127.0).view(torch.int32), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias` for `x` of shape `(..., in)`."""
        x = _autocast(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product: Tensor = _Product.apply(x, self.weight, self.scale.view(torch.float32), bias)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    """`x @ weight.T + bias`, whose backward needs only the codes; the weight itself exists while it is in use."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return F.linear(x, _dequantized(codes, scale, x.dtype), bias)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        codes, scale = ctx.saved_tensors
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
        return gradient @ _dequantized(codes, scale, gradient.dtype), None, None, of_bias


def _dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype).mul_(scale.unsqueeze(1))


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@cache
def _scale_codes() -> tuple[float, ...]:
    """The numbers that codes of scales stand for, also within a trace, where new tensors are fake."""
    with _disable_current_modes(), torch.device("cpu"):
        return tuple(create_dynamic_map().tolist())
