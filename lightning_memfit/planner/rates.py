"""`device_rates`, `cpu_rates`: where rates come from before anything was measured on a device."""

from __future__ import annotations

import os
import time

from lightning_memfit.device.catalogue import DeviceSpec, find_device
from lightning_memfit.estimate.target import Target
from lightning_memfit.planner.cost import Rates

_OF_FLOPS, _OF_BANDWIDTH, _OF_LINK = 0.5, 0.75, 0.8
"""Shares of the data sheet's figures that training reaches (llm.c reports 49 % of the FLOPs on an H100)."""

_CUDA_LAUNCH = 8e-6
"""Seconds of Python and dispatch per operator of an eager training step; about 5 in forward, 10 with autograd."""
_CPU_LAUNCH = 8e-6

_OF_NVLINK, _OF_PCIE_PEERS = 0.75, 0.4
"""Shares that collectives reach: NCCL's ring over NVLink; over PCIe through host memory, as consumer cards must."""

NETWORK_BYTES_PER_S = 12.5e9
"""Between machines: 100 Gbit/s, an assumption."""

DISK_BYTES_PER_S = 2e9
"""What an NVMe drive keeps up for hours, an assumption where none is measured; its data sheet says two to three times
as much."""

HOST_BYTES_PER_S = 40e9
"""Of memory on the host: two channels of DDR4-3200 at 0.8 of their rate."""

_STAND_INS = (("RTX 3060", 16), ("RTX 3090", 32), ("A100 40GB", 60), ("A100 80GB", 1 << 20))
"""What a device of which only the size is known is taken for: a common one of at most that many GiB."""


def rates_of(target: Target) -> Rates:
    """Rates of a planning target."""
    return cpu_rates() if target.kind == "cpu" else device_rates(target)


def device_rates(target: Target) -> Rates:
    """Rates of a CUDA device from the catalogue; a bare size takes those of a common card of that size."""
    known = _known(target.name)
    spec = known or _stand_in(target.capacity_bytes or 0)
    assert spec.bandwidth_bytes_per_s is not None
    link = spec.host_link_bytes_per_s
    flops = {dtype: _OF_FLOPS * rate for dtype, rate in spec.flops.items()}
    return Rates(
        name=known.name if known is not None else target.name,
        flops_per_s=flops,
        bytes_per_s=_OF_BANDWIDTH * spec.bandwidth_bytes_per_s,
        launch_seconds=_CUDA_LAUNCH,
        asynchronous=True,
        link_bytes_per_s=None if link is None else _OF_LINK * link,
        disk_bytes_per_s=DISK_BYTES_PER_S,
        num_cores=_cores(),
        host_bytes_per_s=HOST_BYTES_PER_S,
        interconnect_bytes_per_s=_between(spec),
        network_bytes_per_s=NETWORK_BYTES_PER_S,
    )


def _between(spec: DeviceSpec) -> float | None:
    if spec.peer_bytes_per_s is not None:
        return _OF_NVLINK * spec.peer_bytes_per_s
    return None if spec.host_link_bytes_per_s is None else _OF_PCIE_PEERS * spec.host_link_bytes_per_s


def _known(name: str) -> DeviceSpec | None:
    try:
        spec = find_device(name)
    except ValueError:
        return None
    return spec if spec.flops and spec.bandwidth_bytes_per_s else None


def _stand_in(capacity_bytes: int) -> DeviceSpec:
    return find_device(next(name for name, largest in _STAND_INS if capacity_bytes <= largest << 30))


def cpu_rates() -> Rates:
    """Rates of this CPU with the threads that torch has, measured in about a quarter of a second."""
    import torch

    flops = {name: _matmul_rate(dtype) for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))}
    flops["float16"] = flops["bfloat16"]
    return Rates(
        name=cpu_name(),
        flops_per_s=flops,
        bytes_per_s=_copy_rate(),
        launch_seconds=_CPU_LAUNCH,
        asynchronous=False,
        disk_bytes_per_s=DISK_BYTES_PER_S,
        num_cores=torch.get_num_threads(),
    )


def cpu_name() -> str:
    """Name of this CPU's rates: they depend on the threads."""
    import torch

    return f"CPU, {torch.get_num_threads()} threads"


def _matmul_rate(dtype: object) -> float:
    import torch

    size = 384
    a = torch.ones(size, size, dtype=dtype)  # type: ignore[call-overload]
    return 2 * size**3 / _best_seconds(lambda: a @ a)


def _copy_rate() -> float:
    """Bytes read and written per second by an elementwise operator beyond the caches."""
    import torch

    a = torch.ones(1 << 22)
    return 2 * a.nbytes / _best_seconds(lambda: a * 2.0)


def _best_seconds(run: object, repeats: int = 8) -> float:
    assert callable(run)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
