"""A small ext4 file system in a file, mounted for a test."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
