"""`DeviceKind`: the capabilities of a type of device.

Only this module compares torch's names of device types. Other code asks a `DeviceKind`, so that a further type of
device is one row of the table here. A type that is not in the table ("mps", "xpu") answers no to every question: none
of its memory is measured or predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    import torch

CUDA: Final = "cuda"
CPU: Final = "cpu"
DeviceType = Literal["cuda", "cpu"]
"""The modelled types, as torch, saved files and options of the command line name them."""


@dataclass(frozen=True)
class DeviceKind:
    """Facts that hold for every device of a type."""

    type: str
    """Torch's name, `torch.device.type`."""
    accelerator: str
    """Its name for Lightning's `Trainer(accelerator=...)`."""
    is_modelled: bool = False
    """Whether its memory can be predicted and limited."""
    is_host: bool = False
    """Whether its tensors are in host memory."""
    has_own_memory: bool = False
    """Whether host memory is a second tier, to which tensors can be offloaded and which can be page-locked."""
    has_caching_allocator: bool = False
    """Whether torch's caching allocator serves it, which counts peaks, reserves segments and records its history."""
    rounding_bytes: int = 1
    """Bytes to a multiple of which its allocator rounds sizes up."""
    is_asynchronous: bool = False
    """Whether kernels are queued on streams, so that a clock must wait for them."""
    has_own_generator: bool = False
    """Whether its random numbers come from a generator other than the host's."""
    has_compute_capability: bool = False
    """Whether a compute capability says which number formats and kernels it has."""
    emulated_dispatch: bool = False
    """Whether a trace, which runs on the host, must choose operators and kernels as this device would."""
    compiles_with_triton: bool = False
    """Whether torch.compile generates Triton for it; C++ otherwise."""
    is_catalogued: bool = False
    """Whether a driver names the model, and `device.catalogue` knows its rates by that name."""

    @staticmethod
    def of(device: torch.device | str) -> DeviceKind:
        """The kind of a device, given itself or by name, with or without an index."""
        name = device.split(":")[0] if isinstance(device, str) else device.type
        return _KINDS.get(name) or DeviceKind(name, accelerator=name)


_KINDS = {
    kind.type: kind
    for kind in (
        DeviceKind(CPU, accelerator="cpu", is_modelled=True, is_host=True),
        DeviceKind(
            CUDA,
            accelerator="gpu",
            is_modelled=True,
            has_own_memory=True,
            has_caching_allocator=True,
            rounding_bytes=512,  # kMinBlockSize of c10/core/CachingDeviceAllocator.h
            is_asynchronous=True,
            has_own_generator=True,
            has_compute_capability=True,
            emulated_dispatch=True,
            compiles_with_triton=True,
            is_catalogued=True,
        ),
    )
}
MODELLED = tuple(_KINDS)
"""Names of the types whose memory is modelled: the choices of `--device`."""


def allows_cuda(accelerator: str) -> bool:
    """Whether a Trainer with this `accelerator` takes a CUDA device where there is one."""
    return accelerator in ("auto", "gpu", CUDA)


def cuda_device(index: int = 0) -> torch.device:
    """A CUDA device of this machine."""
    import torch

    return torch.device(CUDA, index)


def index_of(device: torch.device) -> int:
    """Number of a device; that of the current one if only the type is given, which is what torch takes it for."""
    import torch

    if device.index is not None:
        return device.index
    current: int = torch.get_device_module(device).current_device()
    return current


def device_of(accelerator: str) -> torch.device:
    """The first device of an accelerator that Lightning calls "gpu" or "cpu"."""
    import torch

    return cuda_device() if accelerator == _KINDS[CUDA].accelerator else torch.device(CPU)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a device here; None for a type that has none."""
    import torch

    return torch.cuda.get_device_capability(device) if DeviceKind.of(device).has_compute_capability else None


def hardware_name(device: torch.device) -> str:
    """Name of a device here as its driver gives it; the type where there is no driver to ask."""
    import torch

    return torch.cuda.get_device_name(device) if DeviceKind.of(device).is_catalogued else device.type


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    import torch

    if DeviceKind.of(device).is_asynchronous:
        torch.cuda.synchronize(device)
