import mmap
import sys

import pytest
import torch

from lightning_memfit.memory.process import nvml_usage, peak_rss_bytes, pinned_bytes, rss_bytes, swapped_out_bytes


def test_rss_grows_with_memory_in_use():
    before = rss_bytes()
    block = mmap.mmap(-1, 64 << 20)  # new pages, where an allocator could hand out old ones
    block.write(b"x" * (64 << 20))
    assert rss_bytes() - before > 48 << 20
    assert peak_rss_bytes() >= 0.99 * rss_bytes()
    assert len(block) == 64 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_what_was_swapped_out_is_what_psutil_says():
    import psutil

    assert abs(swapped_out_bytes() - psutil.Process().memory_full_info().swap) < 1 << 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_nothing_is_pinned_without_cuda():
    assert pinned_bytes() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_counted():
    torch.zeros(1, device="cuda")
    before = pinned_bytes()
    block = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
    assert pinned_bytes() - before >= block.numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nvml_sees_what_torch_reserves():
    tensor = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    usage = nvml_usage(torch.device("cuda", 0))
    if usage is None:
        pytest.skip("NVML does not answer on this machine")
    assert usage.card_bytes >= torch.cuda.memory_reserved() >= tensor.numel()
    assert usage.process_bytes is None or usage.process_bytes >= tensor.numel()
