"""Errors like CUDA's at the right byte, and exact figures afterwards."""

import gc

import pytest
import torch

from lightning_memfit.device.limit import SimulatedDevice
from lightning_memfit.memory import MIB, Category

KIB = 1024


def test_the_limit_holds_to_the_byte():
    with SimulatedDevice(4 * KIB) as device:
        kept = torch.empty(4 * KIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, dtype=torch.uint8)
        del kept
        torch.empty(4 * KIB, dtype=torch.uint8)
    assert (device.num_ooms, device.peak_bytes, device.live_bytes) == (1, 4 * KIB, 0)


def test_sizes_count_as_the_allocator_rounds_them():
    with SimulatedDevice(1024) as device:
        kept = [torch.empty(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)]
        assert device.live_bytes == 1024
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, dtype=torch.uint8)
        assert len(kept) == 2


def test_the_error_reads_like_cudas():
    from lightning.pytorch.utilities.memory import is_oom_error

    with SimulatedDevice("12MiB") as device:
        device.track(torch.empty(MIB), Category.PARAMETER)
        weight = torch.empty(MIB)
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
            torch.empty(3 * MIB)
        assert weight is not None
    assert is_oom_error(caught.value)
    message = str(caught.value)
    assert message.startswith(
        "CUDA out of memory. Tried to allocate 12.00 MiB. GPU 0 has a total capacity of 12.00 MiB"
    )
    assert "8.00 MiB is free (simulated)" in message
    assert "activation 4.00 MiB" in message


@pytest.mark.parametrize("caching", [False, True])
def test_the_refused_output_is_released_while_the_error_is_alive(caching):
    with SimulatedDevice(64 * MIB, caching=caching) as device:
        a = torch.zeros(4 * MIB)
        used = device.live_bytes
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.cat([a] * 8)
        assert caught.value.__traceback__ is not None
        assert device.live_bytes == used == sum(device.live_by_category.values())
        assert device.peak_bytes == used == sum(device.peak_by_category.values())
        assert device.used_bytes == used
        b = a + 1
        assert device.live_bytes == 2 * used
        del a, b, caught  # its traceback holds the arguments
    assert device.live_bytes == device.num_ooms - 1 == 0


def test_several_outputs_are_refused_together():
    source = [torch.zeros(256) for _ in range(4)]
    with SimulatedDevice(7 * KIB) as device:
        for tensor in source[:1]:
            device.track(tensor, Category.PARAMETER)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 8.00 KiB"):
            torch._foreach_add([source[0]] * 8, 1)
        assert device.live_bytes == 1024


def test_views_and_in_place_operators_cost_nothing():
    with SimulatedDevice(1024) as device:
        tensor = torch.zeros(256)
        tensor.add_(1)
        tensor.view(16, 16).t()[0].mul_(2)
        assert (device.live_bytes, device.num_ooms) == (1024, 0)


def test_a_tracked_tensor_may_not_fit():
    device = SimulatedDevice(1024)
    with pytest.raises(torch.OutOfMemoryError):
        device.track(torch.zeros(1000), Category.INPUT)
    gc.collect()
    assert (device.live_bytes, device.peak_bytes) == (0, 0)


def test_fragmentation_counts_with_caching():
    def three_then_middle(device):
        with device:
            blocks = [torch.empty(4 * MIB, dtype=torch.uint8) for _ in range(5)]
            del blocks[::2]
            return torch.empty(11 * MIB, dtype=torch.uint8)

    three_then_middle(SimulatedDevice(24 * MIB))
    caching = SimulatedDevice(24 * MIB, caching=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"20.00 MiB is reserved"):
        three_then_middle(caching)
    assert caching.allocator.num_ooms == 1


def test_training_recovers_from_an_error_with_exact_figures():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    device = SimulatedDevice(1 * MIB)
    device.track_module(model)
    device.track_optimizer(optimizer)
    weights = device.live_bytes
    with device:
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.zeros(4096, 64)).sum().backward()
        gc.collect()
        assert device.live_bytes == weights
        model(torch.zeros(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
    states = device.live_by_category[Category.OPTIMIZER_STATE]
    assert device.live_bytes == weights + states
    assert states == 2 * weights + 4 * 512
