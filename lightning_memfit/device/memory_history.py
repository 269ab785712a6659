"""Torch's own record of CUDA allocations, for https://pytorch.org/memory_viz.

`torch.cuda.memory._record_memory_history` and `_dump_snapshot` are documented by torch, but their names are private;
written for torch 2.11 to 2.13. `tests/unit/device/test_memory_history.py` fails when they move.
"""

from pathlib import Path

import torch

_MAX_ENTRIES = 100_000  # the last allocations and frees: some tens of MiB of host memory


def start_history() -> None:
    """Record from now on where every block of CUDA memory is allocated and freed."""
    torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES, stacks="python")


def stop_history() -> None:
    """Record no longer, and forget what was recorded."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_snapshot(path: Path) -> None:
    """Write what is allocated now, and its history where one is recorded, as a pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
