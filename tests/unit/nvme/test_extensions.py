import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memfit.nvme.extensions import BuildLock, build_locks, compile_kernels, extensions_folder
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
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"{lock} was left .* Remove that file"):
        compile_kernels()
