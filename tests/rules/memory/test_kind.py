"""What types of devices can do, and the names they come by."""

import pytest
import torch

from lightning_memfit.memory.kind import (
    MODELLED,
    DeviceKind,
    allows_cuda,
    compute_capability,
    cuda_device,
    device_of,
    hardware_name,
    synchronize,
)

QUESTIONS = [name for name in vars(DeviceKind.of("cpu")) if name not in ("type", "accelerator", "rounding_bytes")]


@pytest.mark.parametrize("name", [torch.device("cuda", 1), "cuda", "cuda:1"])
def test_a_device_and_its_names_are_of_one_kind(name: torch.device | str) -> None:
    kind = DeviceKind.of(name)
    assert kind is DeviceKind.of("cuda")
    assert (kind.type, kind.accelerator, kind.rounding_bytes) == ("cuda", "gpu", 512)
    assert kind.has_own_memory
    assert not kind.is_host


def test_the_cpu_is_the_host_and_modelled() -> None:
    kind = DeviceKind.of("cpu")
    assert [name for name in QUESTIONS if getattr(kind, name)] == ["is_modelled", "is_host"]
    assert kind.rounding_bytes == 1


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_other_types_answer_no_to_every_question(name: str) -> None:
    kind = DeviceKind.of(name)
    assert not any(getattr(kind, question) for question in QUESTIONS)
    assert (kind.type, kind.accelerator) == (name, name)
    assert name not in MODELLED


def test_lightnings_accelerators() -> None:
    assert [name for name in ("auto", "gpu", "cuda", "cpu", "mps") if allows_cuda(name)] == ["auto", "gpu", "cuda"]
    assert device_of("gpu") == cuda_device() == torch.device("cuda", 0)
    assert device_of("cpu") == torch.device("cpu")


def test_the_cpu_has_neither_driver_nor_capability() -> None:
    device = torch.device("cpu")
    synchronize(device)
    assert hardware_name(device) == "cpu"
    assert compute_capability(device) is None


@pytest.mark.gpu
def test_a_gpu_has_both() -> None:
    device = cuda_device()
    synchronize(device)
    assert hardware_name(device) == torch.cuda.get_device_name(0)
    assert compute_capability(device) == torch.cuda.get_device_capability(0)
