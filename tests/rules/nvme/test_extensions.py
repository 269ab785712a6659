import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memfit.nvme.extensions import KernelLock


def test_torch_asks_for_the_lock_by_the_name_that_is_replaced() -> None:
    from torch.utils import cpp_extension

    assert "FileBaton(" in inspect.getsource(cpp_extension._jit_compile)
    assert "FileBaton" in vars(cpp_extension)


def test_compiling_does_not_wait_for_nobody(tmp_path: Path) -> None:
    """Torch's own lock, which a process that was killed has left."""
    left = tmp_path / "lock"
    left.touch()
    baton = KernelLock(str(left))
    assert baton.try_acquire()
    baton.release()


LOADS = """
import sys, time
import torch.utils.cpp_extension as torchs
from lightning_memfit.nvme.extensions import outlive_killed_builds

outlive_killed_builds()
baton = torchs.FileBaton(sys.argv[1])
print("asks", flush=True)
if baton.try_acquire():
    print("locked", flush=True)
    sys.stdin.readline()
    baton.release()
else:
    baton.wait()
print("loaded", flush=True)
"""


def loads(lock: Path) -> subprocess.Popen[str]:
    """Another process that needs a kernel, and holds the lock until it is sent a line."""
    command = [sys.executable, "-c", LOADS, str(lock)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "asks\n"
    return process


@pytest.mark.nightly
def test_who_waits_takes_over_from_who_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    first = loads(lock)
    assert first.stdout is not None
    assert first.stdout.readline() == "locked\n"
    second = loads(lock)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.5)
        first.kill()
        first.wait()
        output, _ = second.communicate("\n", timeout=60)
        assert output == "locked\nloaded\n"
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
