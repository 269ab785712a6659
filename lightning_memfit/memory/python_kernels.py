"""Operators on the CPU that are Python programs of their own, whose tensors a dispatch mode doesn't see by itself.

Written for bitsandbytes 0.49-0.50, whose CPU optimizers dequantize, step and quantize with torch operators inside one
custom operator; its fake kernel shows none of that. On CUDA the operator is one kernel without scratch memory.
`tests/unit/memory/test_python_kernels.py` fails when the names move.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

_MODULE = "bitsandbytes.backends.cpu.ops"
_KERNELS = {
    "optimizer_update_8bit_blockwise": "_optimizer_update_8bit_blockwise_cpu",
    "optimizer_update_32bit": "_optimizer_update_32bit_cpu",
}


@functools.cache
def python_kernel(operator: Any) -> Callable[..., Any] | None:
    """The Python function that runs an operator of bitsandbytes on the CPU; None for every other operator."""
    if operator.namespace != "bitsandbytes":
        return None
    kernel = _KERNELS.get(operator._opname)
    return None if kernel is None else getattr(sys.modules[_MODULE], kernel)
