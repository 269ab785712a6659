"""Note which lines of the package each test executes, in its own process and in those that it starts.

On `sys.monitoring` (Python 3.12 or later), where a line costs once for each test and nothing after that.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = tuple(f"{ROOT / name}{os.sep}" for name in ("lightning_memfit", "cli"))


class Recorder:
    """What one process executes, by test, in a file that it shares with the processes forked from it.

    The file is opened once, and each line written at once: a process may be killed at any time, and a step that is
    traced may open none.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}.txt"
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.process = os.getpid()
        self.test = ""
        self.monitoring = sys.monitoring
        self.tool = sys.monitoring.COVERAGE_ID
        # What a module holds is gone when its process ends, or replaced while a step is traced.
        self.sources, self.root, self.write = SOURCES, len(str(ROOT)) + 1, os.write

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
        if test:
            self.note(f"= {test}")
        self.monitoring.restart_events()

    def note(self, text: str) -> None:
        """Write a line, with the number of this process before it."""
        with suppress(OSError):  # a process that closed every descriptor
            self.write(self.file, f"{self.process} {text}\n".encode())

    def _forked(self) -> None:
        self.process = os.getpid()
        self.next(current())

    def _start(self, code: CodeType, _: int) -> object:
        if code.co_filename.startswith(self.sources):
            self.monitoring.set_local_events(self.tool, code, self.monitoring.events.LINE)
        return self.monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> object:
        if self.test:
            self.note(f"{code.co_filename[self.root :]}:{line}")
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
    for path in folder.glob("*.txt"):
        tests: dict[str, str] = {}
        for text in path.read_text().splitlines():
            process, _, rest = text.partition(" ")
            if rest.startswith("= "):
                tests[process] = rest[2:]
            elif not rest.startswith("# "):
                file, _, line = rest.rpartition(":")
                yield tests[process], file, int(line)


def seconds_of(folder: Path) -> Iterator[tuple[str, str, float]]:
    """(test, outcome, seconds) of each setup, call and teardown that `folder` recorded."""
    for path in folder.glob("*.txt"):
        for text in path.read_text().splitlines():
            if text.partition(" ")[2].startswith("# "):
                test, outcome, seconds = text.partition(" ")[2][2:].split("\t")
                yield test, outcome, float(seconds)
