"""Plugin of pytest that records which lines each test executes, and how long it takes.

Processes that a test starts record theirs through a `.pth` file of the environment, which `prepare` writes:

    python -m tests.net.record prepare
    MEMFIT_NET=FOLDER python -m pytest -p tests.net.record -n 2 --dist loadfile
"""

import site
import sys
from pathlib import Path

import pytest

from tests.net.lines import ROOT, begin, recorders

_STARTUP = f"import sys; sys.path.append({str(ROOT)!r}); import tests.net.lines as lines; lines.begin()\n"


def pytest_configure() -> None:
    """Record this process of pytest."""
    begin()


def pytest_runtest_logstart() -> None:
    """Leave out what runs between tests."""
    if recorders:
        recorders[0].test = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin with the next test."""
    if recorders:
        recorders[0].next(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long a test took, in the process that ran it."""
    if recorders and not hasattr(report, "node"):
        recorders[0].note(f"# {report.nodeid}\t{report.outcome}\t{report.duration:.3f}")


if __name__ == "__main__" and sys.argv[1:] == ["prepare"]:
    (Path(site.getsitepackages()[0]) / "memfit_net.pth").write_text(_STARTUP)
