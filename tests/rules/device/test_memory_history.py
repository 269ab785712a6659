"""The private names of torch that snapshots are written with."""

import inspect

import pytest
import torch

from lightning_memfit.fitting.recovery.oom_report import dump_snapshot, start_history, stop_history


def test_torch_still_has_what_is_called() -> None:
    recorded = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "stacks", "max_entries"} <= set(recorded) or "args" in recorded
    assert "filename" in inspect.signature(torch.cuda.memory._dump_snapshot).parameters


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_tells_of_a_history_on_the_card() -> None:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="all")
    try:
        assert not start_history()
    finally:
        stop_history()
    assert start_history()
    stop_history()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_holds_what_was_allocated(tmp_path) -> None:
    import pickle

    start_history()
    block = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    dump_snapshot(tmp_path / "new" / "snapshot.pickle")
    stop_history()
    snapshot = pickle.loads((tmp_path / "new" / "snapshot.pickle").read_bytes())
    sizes = [part["requested_size"] for segment in snapshot["segments"] for part in segment["blocks"]]
    assert block.nbytes in sizes
