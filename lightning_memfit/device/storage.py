"""Test direct I/O and sequential speed in a folder, with one small file that is removed again."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_memfit.memory import MIB

_CHUNK_BYTES = 8 * MIB
"""Bytes of a request: aligned, and large enough for a drive's full rate."""


@dataclass(frozen=True)
class StorageSpeed:
    """Sequential speed of a folder's drive."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    direct_error: str | None
    """Why O_DIRECT can't be used; None if it was used."""


def measure_storage(folder: str | Path, size_bytes: int = 256 * MIB) -> StorageSpeed:
    """Write a file to the drive and read it back, bypassing the page cache if the file system can.

    Without O_DIRECT the file is synchronised after writing and dropped from the cache before reading.

    Raises:
        ValueError: If the folder can't be written to.
    """
    size_bytes = max(_CHUNK_BYTES, size_bytes // _CHUNK_BYTES * _CHUNK_BYTES)
    try:
        descriptor, name = tempfile.mkstemp(prefix="memfit-doctor-", dir=folder)
    except OSError as error:
        raise ValueError(f"`--folder {folder}` can't be written to: {error.strerror}.") from error
    os.close(descriptor)
    try:
        direct_error = _direct_error(name)
        flag = 0 if direct_error is not None else os.O_DIRECT
        write = _write(name, flag, size_bytes)
        read = _read(name, flag)
    except OSError as error:
        raise ValueError(f"`--folder {folder}`: the test file can't be written: {error.strerror}.") from error
    finally:
        os.unlink(name)
    return StorageSpeed(write, read, direct_error)


def _direct_error(name: str) -> str | None:
    """Write a chunk with O_DIRECT and read it back; some file systems open such files and fail at the first access."""
    if not hasattr(os, "O_DIRECT"):
        return "this system has no O_DIRECT"
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        return error.strerror
    try:
        with mmap.mmap(-1, MIB) as written, mmap.mmap(-1, MIB) as read:
            written.write(os.urandom(MIB))
            os.pwrite(descriptor, written, 0)
            os.preadv(descriptor, [read], 0)
            return None if read[:] == written[:] else "what was read is not what was written"
    except OSError as error:
        return error.strerror
    finally:
        os.close(descriptor)


def _write(name: str, flag: int, size_bytes: int) -> float:
    with mmap.mmap(-1, _CHUNK_BYTES) as chunk:  # page-aligned, as O_DIRECT asks for
        chunk.write(os.urandom(MIB) * (_CHUNK_BYTES // MIB))  # random, as some drives compress
        descriptor = os.open(name, os.O_WRONLY | flag)
        started = time.perf_counter()
        try:
            for _ in range(size_bytes // _CHUNK_BYTES):
                os.write(descriptor, chunk)
            os.fsync(descriptor)
            seconds = time.perf_counter() - started
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return size_bytes / seconds


def _read(name: str, flag: int) -> float:
    total = 0
    with mmap.mmap(-1, _CHUNK_BYTES) as chunk:
        descriptor = os.open(name, os.O_RDONLY | flag)
        started = time.perf_counter()
        try:
            while count := os.readv(descriptor, [chunk]):
                total += count
            seconds = time.perf_counter() - started
        finally:
            os.close(descriptor)
    return total / seconds
