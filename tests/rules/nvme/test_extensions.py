import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memfit.nvme import extensions
from lightning_memfit.nvme.extensions import BuildLock, KernelLock, build_locks, extensions_folder
from lightning_memfit.nvme.preflight import check_build_lock

COMPILES = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("locked", flush=True)
time.sleep(60)
"""


def test_torch_compiles_where_we_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for named in (None, str(tmp_path / "named")):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        if named is not None:
            monkeypatch.setenv("TORCH_EXTENSIONS_DIR", named)
        assert Path(_get_build_directory("async_io", False)) == extensions_folder() / "async_io"


def test_lock_is_left_by_who_is_killed(tmp_path: Path) -> None:
    assert build_locks(tmp_path) == []
    lock = tmp_path / "pin_memory" / "lock"
    lock.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", COMPILES, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert build_locks(tmp_path) == [BuildLock(lock, process.pid)]
        assert check_build_lock(BuildLock(lock, process.pid)).level == "note"
    finally:
        process.kill()
        process.communicate()
    (left,) = build_locks(tmp_path)
    assert left == BuildLock(lock, None)
    finding = check_build_lock(left)
    assert finding.level == "problem"
    assert str(lock) in finding.found
    assert finding.fix.startswith("remove that file")


def test_compiling_does_not_wait_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(extensions, "_PATIENCE_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match=f"{lock} was left .* Remove that file"):
        KernelLock(str(lock)).try_acquire()
    assert lock.exists()


def test_torch_asks_for_the_lock_by_the_name_that_is_replaced() -> None:
    from torch.utils import cpp_extension

    assert "FileBaton(" in inspect.getsource(cpp_extension._jit_compile)
    assert "FileBaton" in vars(cpp_extension)


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
        assert build_locks(tmp_path) == []
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
