import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_memfit.estimate.deepspeed_sizes import AioSettings
from lightning_memfit.memory import MIB
from lightning_memfit.nvme import tuning
from lightning_memfit.nvme.tuning import POINTS, AioRate, drive_key, fastest, sweep, tuned_aio
from tests.helpers.aio import needs_aio

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


def rate(block_size: int, read: float, write: float) -> AioRate:
    return AioRate(AioSettings(block_size), read, write)


def test_fastest_reads_and_writes_in_the_least_time() -> None:
    assert fastest([rate(1, 9e9, 1e9), rate(2, 2e9, 2e9), rate(3, 1e9, 8e9)]).settings.block_size == 2


def test_no_point_keeps_tensors_of_a_mebibyte_in_memory() -> None:
    assert {point.min_swapped_bytes for point in POINTS} == {MIB}


@needs_deepspeed
def test_a_drive_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps = []

    def swept(folder: Path) -> list[AioRate]:
        sweeps.append(folder)
        return [rate(MIB, 1e9, 2e9)]

    monkeypatch.setattr(tuning, "sweep", swept)
    cache = tmp_path / "kept" / "aio.json"
    first = tuned_aio(tmp_path, cache)
    (tmp_path / "another").mkdir()
    assert tuned_aio(tmp_path / "another", cache) == first  # the same drive
    assert len(sweeps) == 1
    (key,) = json.loads(cache.read_text())
    assert key == drive_key(tmp_path)
    assert "deepspeed" in key
    monkeypatch.setattr(tuning, "drive_key", lambda folder: "9:9 other deepspeed 0.0")
    tuned_aio(tmp_path, cache)
    assert len(sweeps) == 2
    cache.write_text("not what this version writes")
    tuned_aio(tmp_path, cache)
    assert len(sweeps) == 3


@needs_deepspeed
def test_keys_are_those_that_deepspeed_reads() -> None:
    import inspect

    from deepspeed.runtime.swap_tensor import aio_config

    config = AioSettings(MIB // 8, 32, 2).config()
    assert set(config) <= set(aio_config.AIO_DEFAULT_DICT)
    assert "thread_count" not in inspect.getsource(aio_config)


@needs_deepspeed
@needs_aio
def test_sweep_of_a_real_folder(tmp_path: Path) -> None:
    points = (AioSettings(MIB // 8, 8, 1), AioSettings(MIB, 32, 2))
    rates = sweep(tmp_path, size_bytes=8 * MIB, repeats=1, points=points)
    assert [found.settings for found in rates] == list(points)
    assert min(min(found.read_bytes_per_s, found.write_bytes_per_s) for found in rates) > 1e6
    assert list(tmp_path.iterdir()) == []


@needs_deepspeed
def test_unusable_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing.*can't be written to"):
        sweep(tmp_path / "missing")
