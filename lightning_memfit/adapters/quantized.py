"""`Codes`: a frozen weight in 4 or 8 bits, and the product of a linear layer with it.

The 4-bit format is bitsandbytes' NF4 with double quantization (Dettmers et al., 2023, arXiv 2305.14314): blocks of 64
weights share a scale, and blocks of 256 scales are stored in 8 bits with a common scale. The 8-bit format is its
row-wise one (Dettmers et al., 2022, arXiv 2208.07339), without quantized activations. `Linear4bit` and `Linear8bitLt`
keep weights in subclasses of Parameter, which can't be traced on fake tensors and which their CPU forward repacks in
evaluation mode; therefore codes are plain tensors here, and the same operators are called.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

_BLOCK = 64
_SCALES_PER_BLOCK = 256
_LARGEST_CODE = 127
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Those that the 4-bit kernels know; others, such as float64, are misread without an error and go through float32."""


class Codes(nn.Module):
    """A weight of shape `(out, in)`, in 4 bits two codes to a byte. Its buffers are in no state dictionary."""

    codes: Tensor
    like: Tensor

    def __init__(self, weight: Tensor, bits: int) -> None:
        """Quantize a weight.

        Args:
            weight: `(out, in)`; left as it is.
            bits: 4 or 8.
        """
        super().__init__()
        self.bits = bits
        self.out_features, self.in_features = weight.shape
        # Empty: tells which device and dtype the weight would have by now.
        self.register_buffer("like", weight.new_empty(0), persistent=False)
        self.store(weight)

    def store(self, weight: Tensor) -> None:
        """Quantize another weight of the same shape."""
        weight = weight.detach().contiguous()
        codes, scales = _quantize4(weight) if self.bits == 4 else _quantize8(weight)
        self.register_buffer("codes", codes, persistent=False)
        for name, scale in scales.items():
            # Stored as integers with the same bits, so that converting the module to half precision leaves them alone.
            bits = scale.view(torch.int32) if scale.dtype is torch.float32 else scale
            self.register_buffer(name, bits, persistent=False)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight, `(out, in)`."""
        if self.bits == 8:
            return self.codes.to(dtype) * self._float32("scale").to(dtype).unsqueeze(1)
        known = dtype if dtype in _KERNEL_DTYPES else torch.float32
        operators = torch.ops.bitsandbytes
        scales = operators.dequantize_blockwise(
            self.scale, self._float32("scale_scale"), self._float32("scale_codes"), _SCALES_PER_BLOCK, torch.float32
        )
        scales = scales + self._float32("scale_mean")
        shape = (self.out_features, self.in_features)
        weight: Tensor = operators.dequantize_4bit(self.codes, scales, _BLOCK, "nf4", shape, known)
        return weight.to(dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` for any `x` of shape `(..., in)`.

        The dequantized weight exists only while it is in use, in forward and again in backward.
        """
        output: Tensor = _Product.apply(x, bias, self)  # type: ignore[no-untyped-call]
        return output

    def _float32(self, name: str) -> Tensor:
        bits: Tensor = getattr(self, name)
        return bits.view(torch.float32)


class _Product(torch.autograd.Function):
    """A linear layer whose backward needs only the codes, not its input. Works in `torch.func` transforms."""

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(x: Tensor, bias: Tensor | None, codes: Codes) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return F.linear(x.to(dtype), codes.dequantize(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.codes = inputs
        ctx.input_dtype, ctx.dtype = x.dtype, output.dtype

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = (gradient @ ctx.codes.dequantize(gradient.dtype)).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_input, of_bias, None

    @staticmethod
    @override
    def jvp(ctx: Any, x: Tensor | None, bias: Tensor | None, _: None) -> Tensor | None:
        if x is None:
            return None if bias is None else bias.to(ctx.dtype)
        return F.linear(x.to(ctx.dtype), ctx.codes.dequantize(ctx.dtype), None if bias is None else bias.to(ctx.dtype))


@cache
def _scale_codes() -> tuple[float, ...]:
    """The numbers that codes of scales stand for, also within a trace, where new tensors are fake."""
    with _disable_current_modes(), torch.device("cpu"):
        from bitsandbytes.functional import create_dynamic_map

        return tuple(create_dynamic_map().tolist())


def _quantize4(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    table = torch.tensor(_scale_codes(), dtype=torch.float32, device=weight.device)
    if weight.dtype not in _KERNEL_DTYPES:
        weight = weight.float()
    operators = torch.ops.bitsandbytes
    codes, scales = operators.quantize_4bit(weight, _BLOCK, "nf4", torch.uint8)
    mean = scales.mean()
    small, scale_scale = operators.quantize_blockwise(scales - mean, table, _SCALES_PER_BLOCK)
    return codes, {"scale": small, "scale_scale": scale_scale, "scale_codes": table, "scale_mean": mean.reshape(1)}


def _quantize8(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    weight = weight.float()
    scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST_CODE
    return torch.round(weight / scale.unsqueeze(1)).to(torch.int8), {"scale": scale}
