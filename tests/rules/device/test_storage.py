from pathlib import Path

import pytest

from lightning_memfit.device import storage
from lightning_memfit.device.storage import measure_storage
from lightning_memfit.memory import MIB


def test_speed_is_measured_and_the_file_removed(tmp_path: Path) -> None:
    speed = measure_storage(tmp_path, 16 * MIB)
    assert speed.write_bytes_per_s > 1e5
    assert speed.read_bytes_per_s > 1e5
    assert list(tmp_path.iterdir()) == []


def test_without_direct_io_it_says_so_and_measures_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_direct_error", lambda name: "Invalid argument")
    speed = measure_storage(tmp_path, 8 * MIB)
    assert speed.direct_error == "Invalid argument"
    assert speed.write_bytes_per_s > 1e5


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*can't be written to"):
        measure_storage(tmp_path / "nowhere")
