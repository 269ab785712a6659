"""Note which lines of the package each test executes, in its own process and in those that it starts.

On `sys.monitoring` (Python 3.12 or later), where a line costs once for each test and nothing after that.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = tuple(f"{ROOT / name}{os.sep}" for name in ("lightning_memfit", "cli"))


class Recorder:
    """The lines of one process, by test: a file of its own in `folder`, complete even if the process is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.test = ""
        self.file = -1
        self.monitoring = sys.monitoring
        self.tool = sys.monitoring.COVERAGE_ID
        # What a module holds is gone when the process ends, and calls go on.
        self.sources = SOURCES

    def begin(self) -> None:
        """Call `_start` and `_line` from here on, and in processes that are forked."""
        monitoring, tool = self.monitoring, self.tool
        monitoring.use_tool_id(tool, "memfit-net")
        monitoring.register_callback(tool, monitoring.events.PY_START, self._start)
        monitoring.register_callback(tool, monitoring.events.LINE, self._line)
        monitoring.set_events(tool, monitoring.events.PY_START)
        os.register_at_fork(after_in_child=self._forked)
        self.next(current())

    def next(self, test: str) -> None:
        """Note the lines that `test` executes from here on, also those that an earlier one executed."""
        self.test = test
        if self.test:
            self._write(f"= {self.test}\n")
        self.monitoring.restart_events()

    def _write(self, text: str) -> None:
        if self.file < 0:
            path = self.folder / f"{os.getpid()}.lines"
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        os.write(self.file, text.encode())

    def _forked(self) -> None:
        self.file = -1
        self.next(current())

    def _start(self, code: CodeType, _: int) -> object:
        if code.co_filename.startswith(self.sources):
            self.monitoring.set_local_events(self.tool, code, self.monitoring.events.LINE)
        return self.monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> object:
        if self.test:
            try:
                self._write(f"{code.co_filename[len(str(ROOT)) + 1 :]}:{line}\n")
            except OSError:  # a test that closed every descriptor
                self.file = -1
        return self.monitoring.DISABLE


def current() -> str:
    """The test that this process belongs to, by what pytest leaves in the environment."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


recorders: list[Recorder] = []


def begin() -> None:
    """Record this process, where `MEMFIT_NET` names a folder."""
    if not recorders and (folder := os.environ.get("MEMFIT_NET")):
        recorders.append(Recorder(Path(folder)))
        recorders[0].begin()


def lines_of(folder: Path) -> Iterator[tuple[str, str, int]]:
    """(test, file, line) of all that `folder` recorded."""
    for path in folder.glob("*.lines"):
        test = ""
        for text in path.read_text().splitlines():
            if text.startswith("= "):
                test = text[2:]
            else:
                file, _, line = text.rpartition(":")
                yield test, file, int(line)
