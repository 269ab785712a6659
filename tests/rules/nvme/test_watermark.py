import time
from pathlib import Path

import pytest

from lightning_memfit.nvme.watermark import DiskWatermark, DiskWatermarkError, free_bytes


def test_enough_room(tmp_path: Path) -> None:
    with DiskWatermark(tmp_path, reserve_bytes=4096) as watermark:
        watermark.check()
    assert watermark.least_free_bytes <= free_bytes("/") or watermark.least_free_bytes > 4096


def test_too_little_room(tmp_path: Path) -> None:
    watermark = DiskWatermark(tmp_path, reserve_bytes=2 * free_bytes(tmp_path))
    with pytest.raises(DiskWatermarkError, match=r"left free at .* resume from the last checkpoint"):
        watermark.check()


def test_the_thread_remembers_a_moment_that_no_check_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_memfit.nvme import watermark as module

    free = [10**9]
    monkeypatch.setattr(module, "free_bytes", lambda folder: free[0])
    with DiskWatermark(tmp_path, reserve_bytes=10**8, interval_s=0.01) as watermark:
        free[0] = 10**6
        end = time.monotonic() + 5
        while watermark.least_free_bytes > 10**6 and time.monotonic() < end:
            time.sleep(0.01)
        free[0] = 10**9
        with pytest.raises(DiskWatermarkError):
            watermark.check()


def test_folder_removed_ends_the_thread_quietly(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with DiskWatermark(folder, reserve_bytes=1, interval_s=0.01) as watermark:
        folder.rmdir()
        time.sleep(0.1)
        assert watermark._thread is not None
        assert not watermark._thread.is_alive()


def test_no_reserve() -> None:
    with pytest.raises(ValueError, match="reserve_bytes=0"):
        DiskWatermark("/", reserve_bytes=0)
