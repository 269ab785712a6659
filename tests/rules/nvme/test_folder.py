import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from lightning_memfit.nvme.folder import RunFolder, find_runs, folder_bytes, new_run_id

# A rank of a run: makes or joins the folder, writes a swap file as DeepSpeed does, says so, and waits for its end.
RANK = """
import sys
from lightning_memfit.nvme.folder import RunFolder
how, parent, run_id, rank = sys.argv[1:]
folder = getattr(RunFolder, how)(parent, run_id)
swap = folder.path / "zero_stage_3" / "optimizer" / f"rank{rank}"
swap.mkdir(parents=True)
(swap / "exp_avg-0_3.tensor.swp").write_bytes(bytes(8192))
print(folder.path, flush=True)
command = sys.stdin.readline().strip()
if command == "raise":
    raise SystemError("training failed")
"""


@contextmanager
def rank(how: str, parent: Path, run_id: str, number: int = 0) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, how, str(parent), run_id, str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip(), process.communicate()[1]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def write_swap(folder: Path, name: str = "zero_stage_3/bfloat16params/rank0/7_param.tensor.swp") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(4096))
    return path


def test_folder_is_there_while_the_run_is_and_gone_afterwards(tmp_path: Path) -> None:
    with closing(RunFolder.create(tmp_path, "run1")) as folder:
        before = folder_bytes(folder.path)
        write_swap(folder.path)
        assert folder_bytes(folder.path) - before >= 4096
    assert list(tmp_path.iterdir()) == []
    assert folder.close()  # again


@pytest.mark.parametrize("ending", ["return", "raise"])
def test_folder_is_gone_however_a_process_ends_by_itself(tmp_path: Path, ending: str) -> None:
    with rank("create", tmp_path, "run1") as process:
        process.communicate(f"{ending}\n", timeout=20)
    assert (process.returncode == 0) == (ending == "return")
    assert list(tmp_path.iterdir()) == []


def test_killed_run_is_reaped_by_the_next(tmp_path: Path) -> None:
    with rank("create", tmp_path, "dead") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (state,) = find_runs(tmp_path)
    assert state.is_stale
    assert state.size_bytes >= 8192
    with closing(RunFolder.create(tmp_path, "next")) as folder:
        assert list(tmp_path.iterdir()) == [folder.path]


def test_live_run_is_not_removed(tmp_path: Path) -> None:
    with rank("create", tmp_path, "live"):
        RunFolder.create(tmp_path, "other").close()
        (state,) = find_runs(tmp_path)
        assert not state.is_stale


def test_run_whose_first_rank_was_killed_lives_while_another_does(tmp_path: Path) -> None:
    with rank("create", tmp_path, "run1") as first, rank("join", tmp_path, "run1", 1):
        first.kill()
        first.wait()
        (state,) = find_runs(tmp_path)
        assert not state.is_stale
    (state,) = find_runs(tmp_path)
    assert state.is_stale


def test_owner_waits_for_the_other_ranks(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run1")
    with rank("join", tmp_path, "run1", 1) as other:
        assert not folder.close(timeout_s=0.2)
        assert find_runs(tmp_path)
        assert other.poll() is None


def test_folder_of_another_machine_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / f"memfit-run-far1-faraway-{socket.gethostname()}"  # whose name ends as this one's
    path.mkdir()
    RunFolder.create(tmp_path, "run1").close()
    assert path.is_dir()


def test_forked_worker_does_not_remove_the_folder(tmp_path: Path) -> None:
    with closing(RunFolder.create(tmp_path, "run1")) as folder:
        child = os.fork()
        if child == 0:
            folder.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert folder.path.is_dir()


@pytest.mark.parametrize(("wrong", "message"), [("missing", "does not exist"), ("file", "is not a folder")])
def test_unusable_parent(tmp_path: Path, wrong: str, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        RunFolder.create(tmp_path / wrong, "run1")
    assert not (tmp_path / "missing").exists()


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks nobody can tell whether a run in another container still uses its files."""
    with rank("create", tmp_path, "run1") as process:
        process.kill()
        process.wait()
    assert [state.is_stale for state in find_runs(tmp_path)] == [True]

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert [state.is_stale for state in find_runs(tmp_path)] == [False]
    with pytest.raises(ValueError, match=r"`nvme_path` .* can't be locked \(No locks available\).*on a local drive"):
        RunFolder.create(tmp_path, new_run_id())
    assert [state.path.name for state in find_runs(tmp_path)] == [path.name for path in tmp_path.iterdir()]
