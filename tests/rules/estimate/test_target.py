from types import SimpleNamespace

import pytest
import torch

from lightning_memfit.device import probe
from lightning_memfit.device.catalogue import find_device
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.device.runtime import runtime_memory, safety_margin_bytes
from lightning_memfit.estimate import target as module
from lightning_memfit.estimate.target import (
    DEFAULT_CAPABILITY,
    device_target,
    host_target,
    live_target,
    named_target,
    unnamed_target,
)
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
    monkeypatch.setattr(module, "_DRIVERS", ())
    assert not module._driver_sees_gpu()
    assert live_target() is None


class Cards:
    """CUDA devices of 80 GiB by what is free on them, with what this process has reserved and allocated there."""

    def __init__(self, monkeypatch, *free_bytes, reserved=0, allocated=0):
        def probe_device(index=0):
            self.probed.append(index)
            return probe.DeviceState(
                index, "NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, free_bytes[index], allocated, reserved
            )

        self.probed = []
        monkeypatch.setattr(module, "_driver_sees_gpu", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_bytes))
        monkeypatch.setattr(probe, "probe_device", probe_device)
        self.context = runtime_memory((9, 0)).context_bytes


def test_the_drivers_files_tell_whether_to_ask_torch(monkeypatch, tmp_path):
    driver_sees_gpu = module._driver_sees_gpu
    cards = Cards(monkeypatch, 79 * GIB)
    monkeypatch.setattr(module, "_driver_sees_gpu", driver_sees_gpu)
    monkeypatch.setattr(module, "_DRIVERS", (tmp_path / "nvidiactl",))
    assert live_target() is None
    assert cards.probed == []
    (tmp_path / "nvidiactl").touch()
    assert live_target().capacity_bytes == 79 * GIB + cards.context


def test_its_own_cache_is_free_to_a_process(monkeypatch):
    """An earlier run that was interrupted has left 70 GiB in the allocator's cache."""
    cards = Cards(monkeypatch, 9 * GIB, reserved=70 * GIB)
    assert live_target().capacity_bytes == 79 * GIB + cards.context


def test_tensors_that_are_alive_are_taken_before_a_run_and_its_own_during_it(monkeypatch):
    cards = Cards(monkeypatch, 9 * GIB, reserved=70 * GIB, allocated=60 * GIB)
    before, running = device_target(0), device_target(0, is_running=True)
    assert before.capacity_bytes == 19 * GIB + cards.context
    assert running.capacity_bytes == 79 * GIB + cards.context
    assert (before.source, running.source) == ("free now of 80.00 GiB", "available to this run of 80.00 GiB")


def test_a_limit_makes_a_smaller_device_of_it(monkeypatch):
    cards = Cards(monkeypatch, 70 * GIB)
    limited = live_target(limits=[20 * GIB, 4 * GIB])
    assert limited.capacity_bytes == 4 * GIB + cards.context, "the limit doesn't count the context"
    assert limited.margin_bytes == safety_margin_bytes(4 * GIB + cards.context)
    assert limited.source == "`limit` of MemoryLimit"
    unlimited = live_target(limits=[75 * GIB])
    assert unlimited.capacity_bytes == 70 * GIB + cards.context
    assert unlimited.source == "free now of 80.00 GiB"


@pytest.mark.parametrize(
    ("indices", "free", "probed"),
    [((0,), 70, [0]), ((1,), 30, [1]), ((0, 2), 50, [0, 2]), (None, 30, [0, 1, 2]), ((2, 7), 50, [2])],
)
def test_of_several_devices_the_one_with_the_least_room_counts(monkeypatch, indices, free, probed):
    cards = Cards(monkeypatch, 70 * GIB, 30 * GIB, 50 * GIB)
    assert live_target(indices).capacity_bytes == free * GIB + cards.context
    assert cards.probed == probed, "a context is made on each that is asked"


def test_devices_that_are_not_here_are_refused(monkeypatch):
    Cards(monkeypatch, 70 * GIB)
    with pytest.raises(ValueError, match="CUDA devices 1, 3: this machine has 1, numbered from 0"):
        live_target((1, 3))


def test_a_trainers_own_device_needs_no_nvml(monkeypatch):
    """`MemFit`, budgets of checkpointing and timelines ask torch for the device that it trains on."""
    from lightning_memfit.bench import run_timeline
    from lightning_memfit.fitting.auto import target_of
    from lightning_memfit.techniques.checkpointing_budget import _available_bytes

    cards = Cards(monkeypatch, 70 * GIB, 9 * GIB, reserved=70 * GIB, allocated=60 * GIB)
    monkeypatch.setattr(module, "_driver_sees_gpu", lambda: False)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 1))
    runtime = runtime_memory((9, 0))
    for limits, before, running in (([], 19, 79), ([MemoryLimit("30GiB"), MemoryLimit("8GiB")], 8, 8)):
        trainer = SimpleNamespace(strategy=strategy, callbacks=limits)
        assert target_of(trainer).capacity_bytes == before * GIB + cards.context
        assert run_timeline._target(trainer).capacity_bytes == running * GIB + cards.context
        room, _ = _available_bytes(trainer, runtime)
        assert room == before * GIB + cards.context - (0 if limits else safety_margin_bytes(80 * GIB))
    assert set(cards.probed) == {1}


@pytest.mark.gpu
def test_its_own_cache_is_free_on_the_card():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.empty_cache()
    before = device_target(torch.cuda.current_device())
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    alive, running = device_target(kept.device.index), device_target(kept.device.index, is_running=True)
    del kept
    cached = device_target(torch.cuda.current_device())
    torch.cuda.empty_cache()
    assert alive.capacity_bytes <= before.capacity_bytes - GIB + 64 * MIB
    assert abs(cached.capacity_bytes - before.capacity_bytes) < 64 * MIB
    assert abs(running.capacity_bytes - before.capacity_bytes) < 64 * MIB


@pytest.mark.gpu
def test_live_device_offers_what_is_free():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    target = live_target()
    free, total = torch.cuda.mem_get_info()
    assert 0 < target.usable_bytes < target.capacity_bytes <= total
    assert target.capacity_bytes >= free - GIB


def test_an_amd_device_is_refused(monkeypatch):
    state = probe.DeviceState(0, "AMD Instinct MI300X", (9, 4), 100 * GIB, 90 * GIB, 0, 0)
    monkeypatch.setattr(module, "_driver_sees_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(probe, "probe_device", lambda index: state)
    with pytest.raises(ValueError, match="MI300X is an AMD device"):
        live_target()
