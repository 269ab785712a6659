import pytest
import torch

from lightning_memfit.memory.process import nvml_usage, peak_rss_bytes, rss_bytes


def test_rss_grows_with_memory_in_use():
    before = rss_bytes()
    block = bytearray(b"x" * (64 << 20))
    assert rss_bytes() - before > 48 << 20
    assert peak_rss_bytes() >= 0.99 * rss_bytes()
    assert len(block) == 64 << 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nvml_sees_what_torch_reserves():
    tensor = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    usage = nvml_usage(torch.device("cuda", 0))
    if usage is None:
        pytest.skip("NVML does not answer on this machine")
    assert usage.card_bytes >= torch.cuda.memory_reserved() >= tensor.numel()
    assert usage.process_bytes is None or usage.process_bytes >= tensor.numel()
