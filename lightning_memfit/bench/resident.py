"""`ResidentGrowth`: what a run adds to the resident memory of its process, libraries and what came before left out."""

import contextlib
import ctypes
import gc
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK_ONLY = "5"  # `man 5 proc`: reset the peak of the resident set


class ResidentGrowth:
    """Peak of the resident set from `start` on, less what was resident at `start`.

    Linux only, where the kernel can be told to forget a peak; elsewhere the growth is None. Before it starts, garbage
    is collected and the allocator gives free pages back, so that what ran before leaves nothing to fill.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def start(self) -> None:
        """Remember what is resident, and forget the peak so far."""
        gc.collect()
        if sys.platform != "linux":
            return
        with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        try:
            _CLEAR.write_text(_PEAK_ONLY)
            self._before = _read("VmRSS")
        except OSError:  # a kernel without it, or a sandbox
            self._before = None

    @property
    def growth_bytes(self) -> int | None:
        """Bytes, to a page; None before `start` and where the system doesn't tell."""
        return None if self._before is None else max(0, _read("VmHWM") - self._before)


def _read(name: str) -> int:
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
