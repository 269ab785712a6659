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


def kernel_scratch_bytes(operator: Any, args: Any, result: Any) -> int:
    """Bytes that an operator's CPU kernel takes from torch's allocator while it runs and gives back.

    oneDNN convolves in a layout of its own. Forward copies input and weight into it, gives them back, and copies the
    output out of it; backward holds copies in the shapes of input and output, and in half precision accumulates the
    weight's gradient in fp32. Pointwise convolutions in fp32 need no copies. On one thread this is exact in fp32; in
    bf16 the backward takes up to a fifth more.

    Args:
        operator: The operator that was called.
        args: Its arguments.
        result: What it returned.
    """
    if operator is _CONVOLUTION:
        (data, weight), output = args[:2], result
    elif operator is _CONVOLUTION_BACKWARD:
        output, data, weight = args[:3]
    else:
        return 0
    half = weight.element_size() < 4
    if math.prod(weight.shape[2:]) == 1 and not half:
        return 0
    if operator is _CONVOLUTION:
        return max(data.nbytes + weight.nbytes, output.nbytes)
    if half:
        return data.nbytes + output.nbytes + 4 * weight.numel()
    return max(data.nbytes + output.nbytes, weight.nbytes)
