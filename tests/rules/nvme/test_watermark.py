from pathlib import Path

import pytest

from lightning_memfit.nvme.watermark import DiskWatermarkError, check_reserve, free_bytes


def test_too_little_room_ends_a_run(tmp_path: Path) -> None:
    check_reserve(tmp_path, 4096)
    with pytest.raises(DiskWatermarkError, match=r"left free at .* resume from the last checkpoint"):
        check_reserve(tmp_path, 2 * free_bytes(tmp_path))
