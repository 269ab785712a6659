"""Let a trace on fake CPU tensors choose horizontally batched (`_foreach_`) kernels as a CUDA device would.

torch's optimizers take them by default where parameters lie on CUDA, and AdamW's then needs scratch memory as large as
the weights. Written for torch 2.9-2.13 (`torch.optim.optimizer._default_to_fused_or_foreach`,
`torch.utils._foreach_utils._has_foreach_support`); `tests/unit/profile/test_foreach.py` fails when they move.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.optim.optimizer as optimizer
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils


@contextmanager
def foreach_defaults(cuda: bool) -> Iterator[None]:
    """Count fake tensors as plain ones, and with `cuda` the CPU as a device whose optimizers default to `_foreach_`."""
    tables = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    devices = optimizer._get_foreach_kernels_supported_devices
    for table in tables:
        table.append(FakeTensor)
    if cuda:
        optimizer._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        optimizer._get_foreach_kernels_supported_devices = devices
        for table in tables:
            table.remove(FakeTensor)
