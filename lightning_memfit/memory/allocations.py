"""`allocation_events`: what torch's CPU allocator gives out and takes back, kernels' scratch memory included.

Dispatch modes see what operators return. The allocator also reports what kernels take while they run. It knows the
sizes of what it gave out under a profiler only: what was allocated before, and is freed meanwhile, goes unreported, or
is reported with the size of what lay there under an earlier profiler.

Written for torch 2.11-2.13 (`_enable_profiler_legacy`: the profiler that replaced it takes seconds to start, and some
builds write two lines to stderr whenever it runs); `tests/rules/memory/test_allocations.py` fails when it moves.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ProfilerRunningError(RuntimeError):
    """A profiler runs already, and there can only be one in a process."""

    def __init__(self) -> None:
        super().__init__(
            "allocation events can't be read while a profiler runs, as there can only be one: end it first, or do "
            "without exact figures"
        )


def profiler_runs() -> bool:
    """Whether a profiler of torch runs in this process."""
    return bool(torch._C._autograd._profiler_enabled())


class AllocationReader:
    """Read the allocator's events between `start` and `stop`.

    Every operator that runs in between leaves events in memory and costs some microseconds.
    """

    def __init__(self) -> None:
        self.is_running = False

    def start(self) -> None:
        """Begin to read.

        Raises:
            ProfilerRunningError: If a profiler runs.
        """
        from torch._C._autograd import _enable_profiler_legacy
        from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

        if profiler_runs():
            raise ProfilerRunningError
        # Only memory, the second flag, is recorded; no shapes, stacks, FLOPs or modules.
        flags = (False, True, False, False, False)
        _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *flags, _ExperimentalConfig()))
        self.is_running = True

    def stop(self) -> list[int]:
        """End, and return the sizes of all allocations in the order of time, in bytes; those freed are negative."""
        from torch._C._autograd import _disable_profiler_legacy

        if not self.is_running:
            return []
        self.is_running = False
        threads = [
            [event for event in thread if str(event.kind()) == "memory_alloc"] for thread in _disable_profiler_legacy()
        ]
        found = [event for thread in threads for event in thread]
        if sum(map(bool, threads)) > 1:
            first = found[0]
            found.sort(key=first.cpu_elapsed_us)
        return [int(event.cpu_memory_usage()) for event in found]


@contextmanager
def allocation_events() -> Iterator[list[int]]:
    """Collect the sizes that the CPU allocator gives out, and as negative numbers those that it takes back.

    The list is filled at the end.

    Raises:
        ProfilerRunningError: If a profiler runs.
    """
    changes: list[int] = []
    reader = AllocationReader()
    reader.start()
    try:
        yield changes
    finally:
        changes.extend(reader.stop())
