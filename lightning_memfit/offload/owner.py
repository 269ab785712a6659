"""Who a run folder belongs to: a process, told apart from a later one with the same number."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

OWNER_FILE = "owner.json"
_FORMAT = 1


@dataclass(frozen=True)
class Owner:
    """A process on a machine. Its number may be given out again; number, start and boot together may not."""

    run_id: str
    host: str
    pid: int
    started: int
    """Clock ticks after boot, from `/proc/<pid>/stat`."""
    boot_id: str
    format: int = _FORMAT

    @classmethod
    def this_process(cls, run_id: str) -> Owner:
        """Describe the calling process."""
        started = _started(os.getpid())
        assert started is not None
        return cls(run_id, socket.gethostname(), os.getpid(), started, _boot_id())

    @classmethod
    def read(cls, folder: Path) -> Owner | None:
        """Read a folder's owner file; None where there is none that this version wrote."""
        try:
            owner = cls(**json.loads((folder / OWNER_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return owner if owner.format == _FORMAT else None

    def write(self, folder: Path) -> None:
        """Write the owner file; a crash leaves all of it or nothing."""
        partial = folder / f"{OWNER_FILE}.partial"
        partial.write_text(json.dumps(asdict(self)) + "\n")
        partial.rename(folder / OWNER_FILE)

    @property
    def is_here(self) -> bool:
        """Whether it ran on this machine, so that this machine can tell whether it still does."""
        return self.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """Whether the process still runs, as far as this machine can see."""
        return self.boot_id == _boot_id() and _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _started(pid: int) -> int | None:
    """Start of a process; None where there is none, or only a zombie that nobody has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
