"""`KernelRecords`: what CPU kernels take, remembered in the process and in files beside the profiles.

A file belongs to one processor, torch version and set of settings that decide which kernel runs. Every process appends
whole lines to it and reads those of others; a line that can't be read is left out.
"""

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from lightning_memfit.memory.cache_files import checksum, default_cache_folder, is_own, tell_once
from lightning_memfit.memory.float32_products import precisions_on_host
from lightning_memfit.profile.fingerprint import describe_processor
from lightning_memfit.profile.process import bring_home

_FORMAT = 5
"""Number of the rules by which kernels are learned; with another one, everything is learned anew."""


@dataclass(frozen=True)
class Kernel:
    """What an operator's kernel takes from the allocator beyond its results."""

    peaks: tuple[int, ...] = ()
    """Bytes beyond the results at every local peak, in the order of time. Each grows by a constant per sample, while
    the highest of them may be another one for large batches."""
    extra: tuple[int, ...] = ()
    """Bytes of each result's storage beyond those of its elements; empty if there are none."""
    dtypes: tuple[str, ...] = ()
    """Types of the results, where they are others than those of fake results; else empty."""
    orders: tuple[tuple[int, ...], ...] = ()
    """Dimensions of each result in memory, outermost first, where fake results lie otherwise; else empty."""
    is_known: bool = True
    """False if the operator could not be run; `peaks` is then an estimate, or empty."""


class KernelRecords:
    """Kernels under the settings of this process.

    Args:
        settings: What decides which kernels run.
    """

    _of: ClassVar[dict[str, "KernelRecords"]] = {}

    def __init__(self, settings: str) -> None:
        self.settings = settings
        self.calls: dict[Any, Kernel | None] = {}
        """By operator and arguments, as this process compares them."""
        self.free: set[Any] = set()
        """Pointwise operators and dtypes that take nothing, whatever the shapes."""
        self._known: dict[str, Kernel | None] = {}
        self._new: list[str] = []
        self._learned: dict[str, Kernel | None] = {}
        self._folder: Path | None = None

    @classmethod
    def of_settings(cls) -> "KernelRecords":
        """The records under the settings at hand, with those that other processes wrote to disk."""
        settings = repr((_FORMAT, torch.__version__, describe_processor("cpu"), _switches()))
        records = cls._of.setdefault(settings, cls(settings))
        records._read()
        return records

    @classmethod
    def all(cls) -> "list[KernelRecords]":
        """The records under all settings that this process has had."""
        return list(cls._of.values())

    @classmethod
    def learned(cls) -> dict[str, dict[str, Kernel | None]]:
        """What this process has learned, by settings, for the one that made it."""
        return {settings: records._learned for settings, records in cls._of.items()}

    @classmethod
    def take(cls, learned: dict[str, dict[str, Kernel | None]]) -> None:
        """Take over what another process has learned."""
        for settings, kernels in learned.items():
            records = cls._of.setdefault(settings, cls(settings))
            records._known.update(kernels)
            records._learned.update(kernels)

    @classmethod
    def forget(cls) -> None:
        """Forget everything that this process knows."""
        cls._of.clear()

    def __contains__(self, text: str) -> bool:
        return _digest(text) in self._known

    def __getitem__(self, text: str) -> Kernel | None:
        return self._known[_digest(text)]

    def __setitem__(self, text: str, kernel: Kernel | None) -> None:
        key = _digest(text)
        self._known[key] = self._learned[key] = kernel
        if kernel is None or kernel.is_known:
            value = None if kernel is None else [kernel.peaks, kernel.extra, kernel.dtypes, kernel.orders]
            self._new.append(json.dumps([key, value, _seal(key, value)], separators=(",", ":")))

    def path(self, folder: Path) -> Path:
        """The file of these settings in a cache folder."""
        return folder / "kernels" / f"{_digest(self.settings)}.jsonl"

    def _read(self) -> None:
        """Read what is on disk, once for each folder."""
        folder = default_cache_folder()
        if folder == self._folder:
            return
        self._folder = folder
        try:
            if not is_own(self.path(folder).parent):
                return
            lines = self.path(folder).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # cut off, or written by something else
                key, value, seal = json.loads(line)
                if seal != _seal(key, value):
                    continue
                kernel = None
                if value is not None:
                    peaks, extra, dtypes, orders = value
                    kernel = Kernel(_sizes(peaks), _sizes(extra), tuple(map(str, dtypes)), tuple(map(_sizes, orders)))
                self._known.setdefault(str(key), kernel)

    def write(self) -> None:
        """Append what was learned since the last time, in one write, so that lines of several processes don't mix."""
        if not self._new:
            return
        lines, self._new = self._new, []
        path = self.path(default_cache_folder())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not is_own(path.parent):
                return
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, "\n".join(("", *lines, "")).encode())  # the last line there may be cut off
            finally:
                os.close(file)
        except OSError as error:
            tell_once(path.parent, f"entries can't be written: {error}")


bring_home(KernelRecords.learned, KernelRecords.take)


def keep_learned() -> None:
    """Write what was learned to disk."""
    for records in KernelRecords.all():
        records.write()


def _switches() -> tuple[object, ...]:
    """Settings of torch that decide which kernels run, beside the processor and its variables."""
    return (
        torch.backends.mkldnn.enabled,
        precisions_on_host(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _seal(key: str, value: Any) -> str:
    return checksum([key, value])[:16]


def _sizes(values: Any) -> tuple[int, ...]:
    """Sizes read from a file.

    Raises:
        ValueError: If they aren't sizes.
    """
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} is no list of sizes")
    return tuple(values)
