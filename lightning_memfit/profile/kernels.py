"""What oneDNN's kernels allocate out of a dispatch mode's sight; measured on torch 2.13."""

import math
from typing import Any

import torch

_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


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
