"""`QuantizedLinear`: a frozen linear layer whose weight is stored in 4 or 8 bits.

The 4-bit format is bitsandbytes' NF4 with double quantization (Dettmers et al., 2023, arXiv 2305.14314): blocks of 64
weights share a scale, and blocks of 256 scales are stored in 8 bits with a common scale. The 8-bit format is its
row-wise one (Dettmers et al., 2022, arXiv 2208.07339), without quantized activations. `Linear4bit` and `Linear8bitLt`
keep weights in subclasses of Parameter, which can't be traced on fake tensors and which their CPU forward repacks in
evaluation mode; therefore this layer holds plain tensors and calls the same operators.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_memfit.adapters.linears import is_conv1d

_BLOCK = 64
_SCALES_PER_BLOCK = 256
_LARGEST_CODE = 127


class QuantizedLinear(nn.Linear):
    """Compute `x @ dequantize(weight).T + bias` for any `x` of shape `(..., in_features)`.

    `weight` holds codes, in 4 bits two to a byte. The dequantized weight exists only while it is in use, in forward and
    again in backward.
    """

    is_quantized_linear = True

    def __init__(self, source: nn.Module, bits: int) -> None:
        """Quantize the weight of an `nn.Linear` or a `Conv1D`, whose bias is shared.

        Args:
            source: The layer; left as it is.
            bits: 4 or 8.
        """
        nn.Module.__init__(self)
        weight = source.weight.detach()  # type: ignore[operator]
        weight = (weight.t() if is_conv1d(source) else weight).contiguous()
        self.out_features, self.in_features = weight.shape
        self.was_conv1d = is_conv1d(source)
        self.bits = bits
        self.bias = source.bias  # type: ignore[assignment]
        codes, scales = _quantize4(weight) if bits == 4 else _quantize8(weight)
        self.weight = nn.Parameter(codes, requires_grad=False)
        for name, scale in scales.items():
            # Stored as integers with the same bits, so that converting the module to half precision leaves them alone.
            self.register_buffer(name, scale.view(torch.int32) if scale.dtype is torch.float32 else scale)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight, `(out_features, in_features)`."""
        if self.bits == 8:
            return self.weight.to(dtype) * self._float32("scale").to(dtype).unsqueeze(1)
        operators = torch.ops.bitsandbytes
        scales = operators.dequantize_blockwise(
            self.scale, self._float32("scale_scale"), self._float32("scale_codes"), _SCALES_PER_BLOCK, torch.float32
        )
        scales = scales + self._float32("scale_mean")
        shape = (self.out_features, self.in_features)
        weight: Tensor = operators.dequantize_4bit(self.weight, scales, _BLOCK, "nf4", shape, dtype)
        return weight

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to `(..., in_features)`."""
        output: Tensor = _QuantizedProduct.apply(input, self.bias, self)  # type: ignore[no-untyped-call]
        return output

    @override
    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"{super().extra_repr()}, bits={self.bits}"

    def _float32(self, name: str) -> Tensor:
        bits: Tensor = getattr(self, name)
        return bits.view(torch.float32)


class _QuantizedProduct(torch.autograd.Function):
    """A linear layer whose backward needs only the layer, not its input."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.layer = layer
        ctx.input_dtype = x.dtype
        return F.linear(x.to(dtype), layer.dequantize(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = (gradient @ ctx.layer.dequantize(gradient.dtype)).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_input, of_bias, None


def _quantize4(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    import bitsandbytes.functional

    operators = torch.ops.bitsandbytes
    codes, scales = operators.quantize_4bit(weight, _BLOCK, "nf4", torch.uint8)
    table = bitsandbytes.functional.create_dynamic_map().to(weight.device)
    mean = scales.mean()
    small, scale_scale = operators.quantize_blockwise(scales - mean, table, _SCALES_PER_BLOCK)
    return codes, {"scale": small, "scale_scale": scale_scale, "scale_codes": table, "scale_mean": mean.reshape(1)}


def _quantize8(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    weight = weight.float()
    scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST_CODE
    return torch.round(weight / scale.unsqueeze(1)).to(torch.int8), {"scale": scale}
