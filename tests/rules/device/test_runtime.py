import pytest
import torch

from lightning_memfit.device.runtime import runtime_memory, safety_margin_bytes
from lightning_memfit.memory import GIB, MIB


def test_torchs_default_workspaces(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    assert runtime_memory((8, 6)).allocated_bytes == 2 * (2 * 4096 + 8 * 16 + 1024) * 1024
    assert runtime_memory((9, 0)).workspace_bytes == 32 * MIB
    assert runtime_memory(None) == runtime_memory((9, 0))


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert runtime_memory((9, 0)).workspace_bytes == 128 * 1024
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "lots")
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=lots"):
        runtime_memory((9, 0))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert runtime_memory((9, 0)).lt_workspace_bytes == 4 * MIB
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    assert runtime_memory((9, 0)).lt_workspace_bytes == 0
    monkeypatch.delenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "lots")
    with pytest.raises(ValueError, match="CUBLASLT_WORKSPACE_SIZE=lots"):
        runtime_memory((9, 0))


def test_the_margin_grows_with_the_device():
    assert safety_margin_bytes(4 * GIB) == 128 * MIB
    assert safety_margin_bytes(100 * GIB) == 2 * GIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_expected_workspaces_are_measured():
    """Of small matrix products with a bias, forward and backward."""
    device = torch.device("cuda", 0)
    torch._C._cuda_clearCublasWorkspaces()
    cleared = torch.cuda.memory_allocated(device)
    weight, bias = torch.zeros(64, 64, device=device, requires_grad=True), torch.zeros(64, device=device)
    product = torch.addmm(bias, weight, weight)
    product.register_hook(lambda gradient: torch.addmm(bias, gradient, gradient))
    product.sum().backward()
    torch.cuda.synchronize(device)
    measured = torch.cuda.memory_allocated(device) - cleared
    expected = runtime_memory(torch.cuda.get_device_capability()).allocated_bytes
    assert expected <= measured < expected + MIB
