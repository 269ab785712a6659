"""The fastest settings of asynchronous I/O for a drive, measured once in a few seconds, in this process.

DeepSpeed's own `ds_nvme_tune` starts an interpreter per setting and takes many minutes, and its configuration does not
accept the output. Only a few settings are tried here, since drives differ little between them, and no block is longer
than 1 MiB: tensors below one block are never swapped.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_memfit.estimate.deepspeed_sizes import AioSettings
from lightning_memfit.memory import MIB
from lightning_memfit.memory.cache_files import default_cache_folder, is_own, opened, sealed, write_file
from lightning_memfit.nvme.extensions import outlive_killed_builds

POINTS = tuple(
    AioSettings(block_size, queue_depth, threads)
    for block_size, queue_depth, threads in itertools.product((MIB // 8, MIB), (8, 32), (1, 2))
)


@dataclass(frozen=True)
class AioRate:
    """Rates that one setting reached."""

    settings: AioSettings
    read_bytes_per_s: float
    write_bytes_per_s: float


def tuned_aio(folder: str | Path, cache: str | Path | None = None) -> AioRate:
    """The settings for a folder's drive, from the cache or by a sweep.

    Args:
        folder: Where swap files will be; a file of 64 MiB is written and removed.
        cache: File of earlier results, by drive and DeepSpeed version. By default it is in the folder of the cached
            profiles.

    Raises:
        ValueError: If the folder can't be written to.
        ModuleNotFoundError: If DeepSpeed is missing.
    """
    path = Path(cache) if cache is not None else _default_cache()
    known = _read(path)
    key = drive_key(folder)
    if key in known:
        return known[key]
    best = fastest(sweep(folder))
    _write(path, {**known, key: best})
    return best


def sweep(
    folder: str | Path, size_bytes: int = 64 * MIB, repeats: int = 2, points: tuple[AioSettings, ...] = POINTS
) -> list[AioRate]:
    """Write and read one file with every setting.

    Args:
        folder: Folder for the file; it must exist and be writable.
        size_bytes: Size of the file.
        repeats: Number of measurements, of which the best counts.
        points: Settings to try.

    Raises:
        ValueError: If the folder can't be written to.
        ModuleNotFoundError: If DeepSpeed is missing.
    """
    with _scratch_file(folder) as name:
        return [_measure(name, settings, size_bytes, repeats) for settings in points]


def fastest(rates: list[AioRate]) -> AioRate:
    """The rate with the shortest step, which reads and writes about as much: the largest harmonic mean."""
    return min(rates, key=lambda rate: 1 / rate.read_bytes_per_s + 1 / rate.write_bytes_per_s)


def drive_key(folder: str | Path) -> str:
    """Name of a folder's file system together with the version of DeepSpeed."""
    device = os.stat(folder).st_dev
    return f"{os.major(device)}:{os.minor(device)} {_mount_source(device)} deepspeed {version('deepspeed')}"


def _measure(name: str, settings: AioSettings, size_bytes: int, repeats: int) -> AioRate:
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    options = settings.config()
    outlive_killed_builds()
    handle = AsyncIOBuilder().load(verbose=False).aio_handle(**options)
    buffer = handle.new_cpu_locked_tensor(size_bytes, torch.empty(0, dtype=torch.uint8))
    try:
        # Drives that compress would look too fast on zeros. The run's own random numbers stay where they are.
        buffer.random_(0, 256, generator=torch.Generator())
        writes = [_seconds(handle, handle.async_pwrite, buffer, name) for _ in range(repeats)]
        reads = [_seconds(handle, handle.async_pread, buffer, name) for _ in range(repeats)]
    finally:
        handle.free_cpu_locked_tensor(buffer)
    return AioRate(settings, size_bytes / min(reads), size_bytes / min(writes))


def _seconds(handle: Any, operation: Any, buffer: Any, name: str) -> float:
    started = time.perf_counter()
    operation(buffer, name, 0)
    handle.wait()
    return time.perf_counter() - started


@contextmanager
def _scratch_file(folder: str | Path) -> Iterator[str]:
    try:
        descriptor, name = tempfile.mkstemp(prefix="memfit-tuning-", dir=folder)
    except OSError as error:
        raise ValueError(f"`folder={str(folder)!r}` can't be written to: {error.strerror}. Name another.") from error
    os.close(descriptor)
    try:
        yield name
    finally:
        os.unlink(name)


def _mount_source(device: int) -> str:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 2]
    return "unknown"


def _default_cache() -> Path:
    return default_cache_folder() / "aio.json"


def _read(path: Path) -> dict[str, AioRate]:
    """The rates in a cache file; empty if there is none that can be believed, so that drives are measured again."""
    try:
        document = json.loads(path.read_text()) if is_own(path.parent) else {}
        entries = {key: opened(value) for key, value in document.items()}
        return {key: AioRate(AioSettings(**value.pop("settings")), **value) for key, value in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write(path: Path, rates: dict[str, AioRate]) -> None:
    text = json.dumps({key: sealed(asdict(rate)) for key, rate in rates.items()}, indent=2) + "\n"
    write_file(path, lambda file: file.write(text.encode()))
