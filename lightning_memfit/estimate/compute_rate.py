"""Rates that extra time is predicted with: the catalogue's, reduced to what training programs reach of them."""

import torch

from lightning_memfit.device.catalogue import find_device
from lightning_memfit.estimate.checkpointing_budget import ComputeRate

_OF_FLOPS = 0.5
"""Share of the peak that matrix products of training reach (llm.c reports 49 % on an H100)."""
_OF_BANDWIDTH = 0.75
_OF_LINK = 0.8

_UNKNOWN = "A100 80GB"
"""Stands for devices that are not in the catalogue: a plan needs the proportions only."""


def device_rate(name: str, dtype: torch.dtype) -> ComputeRate:
    """Rate of a CUDA device, by the name that the driver gives.

    Args:
        name: For example `NVIDIA H200`.
        dtype: In which matrix products are computed.
    """
    try:
        spec = find_device(name)
    except ValueError:
        spec = find_device(_UNKNOWN)
    if spec.bandwidth_bytes_per_s is None or not spec.flops:
        spec = find_device(_UNKNOWN)
    kind = "tf32" if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32 else str(dtype)
    known = kind.removeprefix("torch.") in spec.flops
    flops = spec.flops_for(kind) if known else spec.flops_for(torch.float32)
    link = spec.host_link_bytes_per_s
    assert spec.bandwidth_bytes_per_s is not None
    return ComputeRate(
        _OF_FLOPS * flops, _OF_BANDWIDTH * spec.bandwidth_bytes_per_s, None if link is None else _OF_LINK * link
    )


def cpu_rate(dtype: torch.dtype) -> ComputeRate:
    """Rate of a CPU core pair with AVX-512 as measured: 75 GFLOP/s in fp32, 330 with bf16 instructions, 10 GB/s.

    Offloading is no option, as host memory is what there is.
    """
    return ComputeRate(75e9 if dtype is torch.float32 else 330e9, 10e9)
