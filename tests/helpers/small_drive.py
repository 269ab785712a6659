"""File systems mounted for a test: a small ext4 one in a file, and one in memory that refuses O_DIRECT."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_drive(folder: Path, size_mib: int, *options: str) -> Iterator[Path]:
    """Mount an ext4 file system of `size_mib` below a folder; skip the test where that isn't allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    image, mount = folder / "drive.img", folder / "drive"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    done = subprocess.run(
        ["mount", "-o", ",".join(("loop", *options)), image, mount], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"loop devices can't be mounted here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)
        image.unlink()


def fill(folder: Path) -> None:
    """Leave no room on the drive of a folder."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


@contextmanager
def drive_without_direct_io(folder: Path) -> Iterator[Path]:
    """Mount a ramfs, which answers O_DIRECT with EINVAL as tmpfs did before Linux 6.6. It says it has no free space."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    mount = folder / "ram"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "ramfs", "none", mount], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"ramfs can't be mounted here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)
