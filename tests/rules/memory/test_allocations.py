import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_memfit.memory.allocations import (
    AllocationReader,
    ProfilerRunningError,
    allocation_events,
    profiler_runs,
)


def test_frees_follow_allocations():
    with allocation_events() as changes:
        x = torch.rand(1000)
        y = torch.rand(10)
        del x
    assert changes == [4000, 40, -4000]
    assert y.nbytes == 40


def test_allocations_of_several_threads_are_in_the_order_of_time():
    kept = []
    with allocation_events() as changes:
        kept.append(torch.empty(25, dtype=torch.uint8))
        thread = threading.Thread(target=lambda: kept.append(torch.empty(50, dtype=torch.uint8)))
        thread.start()
        thread.join()
        kept.append(torch.empty(75, dtype=torch.uint8))
    assert changes in ([25, 75], [25, 50, 75])  # the profiler may follow its own thread only
    assert len(kept) == 3


def test_a_profiler_that_runs_is_left_alone():
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert profiler_runs()
        with pytest.raises(ProfilerRunningError, match="only be one"), allocation_events():
            pass
        torch.ones(3)
    assert any(event.key == "aten::ones" for event in profiler.key_averages())
    assert not profiler_runs()


def test_an_error_ends_the_reading():
    with pytest.raises(ZeroDivisionError), allocation_events():
        _ = 1 / 0
    assert not profiler_runs()
    assert AllocationReader().stop() == []
