import sys

import pytest

from lightning_memfit.device.catalogue import find_device
from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.estimate import target as module
from lightning_memfit.estimate.target import DEFAULT_CAPABILITY, host_target, live_target, named_target, unnamed_target
from lightning_memfit.memory import GIB, MIB


def test_catalogue_device_brings_its_capability():
    target, spec = named_target("RTX 3060"), find_device("RTX 3060")
    assert target.capability == spec.compute_capability == (8, 6)
    assert target.usable_bytes == spec.memory_bytes - safety_margin_bytes(spec.memory_bytes)
    assert target.kind == "cuda"


def test_size_and_unknown_device():
    assert named_target("12GiB").capacity_bytes == 12 * GIB
    assert named_target("12GiB").capability == DEFAULT_CAPABILITY
    assert unnamed_target().usable_bytes is None
    with pytest.raises(ValueError, match="RTX 306000"):
        named_target("RTX 306000")


def test_cpu_is_held_against_available_memory_or_a_limit():
    assert 0 < named_target("cpu").usable_bytes < named_target("CPU").capacity_bytes * 1.5
    limited = host_target(400 * MIB)
    assert limited.usable_bytes == 400 * MIB
    assert "MemoryLimit" in limited.name
    assert limited.counts_tensors
    assert not named_target("cpu").counts_tensors


def test_without_a_driver_there_is_no_live_device(monkeypatch):
    class Missing:
        class NVMLError(Exception):
            pass

        def nvmlInit(self):
            raise self.NVMLError

    monkeypatch.setitem(sys.modules, "pynvml", Missing())
    assert not module._driver_sees_gpu()
    assert live_target() is None


@pytest.mark.gpu
def test_live_device_offers_what_is_free():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    target = live_target()
    free, total = torch.cuda.mem_get_info()
    assert 0 < target.usable_bytes < target.capacity_bytes <= total
    assert target.capacity_bytes >= free - GIB


def test_an_amd_device_here_has_no_cuda_context_either(monkeypatch):
    torch = pytest.importorskip("torch")
    from lightning_memfit.device import probe

    state = probe.DeviceState(0, "AMD Instinct MI300X", (9, 4), 100 * GIB, 90 * GIB, 0, 0, None, None)
    monkeypatch.setattr(module, "_driver_sees_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(probe, "probe_device", lambda index: state)
    target = live_target()
    assert (target.runtime, target.capability, target.capacity_bytes) == (None, DEFAULT_CAPABILITY, 90 * GIB)
    assert "MI300X is an AMD device" in target.lower_bound
