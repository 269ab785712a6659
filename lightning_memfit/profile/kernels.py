"""What CPU kernels allocate out of a dispatch mode's sight.

Written for bitsandbytes 0.49-0.50, whose CPU optimizers dequantize, step and quantize with torch operators inside one
custom operator; its fake kernel shows none of that. On CUDA the operator is one kernel without scratch memory.
`tests/unit/profile/test_kernels.py` fails when the names move.
oneDNN's buffers were measured on torch 2.13.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default

_MODULE = "bitsandbytes.backends.cpu.ops"
_KERNELS = {
    "optimizer_update_8bit_blockwise": "_optimizer_update_8bit_blockwise_cpu",
    "optimizer_update_32bit": "_optimizer_update_32bit_cpu",
}


def python_kernel(operator: Any) -> Callable[..., Any] | None:
    """The Python function that runs an operator of bitsandbytes on the CPU; None for every other operator."""
    if operator.namespace != "bitsandbytes":
        return None
    kernel = _KERNELS.get(operator._opname)
    return None if kernel is None else getattr(sys.modules[_MODULE], kernel)


def kernel_scratch_bytes(operator: Any, args: Any) -> int:
    """Bytes that an operator's CPU kernel takes from torch's allocator while it runs and gives back.

    oneDNN reorders the weight of a convolution wider than one pixel; its backward accumulates half precision in fp32.
    """
    if operator is _CONVOLUTION:
        weight, width = args[1], args[1].element_size()
    elif operator is _CONVOLUTION_BACKWARD:
        weight, width = args[2], 4
    else:
        return 0
    pixels = math.prod(weight.shape[2:])
    return weight.numel() * width if pixels > 1 else 0
