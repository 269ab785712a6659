"""How tests with several ranks end."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks


def waits_for_nothing():
    if os.environ["RANK"] == "1":
        time.sleep(60)


def test_a_rank_that_is_killed_says_so_and_where_it_was(tmp_path):
    first, second = run_ranks(waits_for_nothing, 2, tmp_path, seconds=1.0)
    assert (first.code, first.output) == (0, "")
    assert second.code == -signal.SIGKILL
    assert "rank 1 had not ended after" in second.output
    assert "in waits_for_nothing" in second.output


def test_ranks_have_nothing_of_the_tests_process(tmp_path):
    """A process group left by another test made ranks of later ones wait for ever."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ended = run_ranks(torch.distributed.is_initialized, 2, tmp_path / "ranks")
    finally:
        torch.distributed.destroy_process_group()
    assert [one.result for one in ended] == [False, False]


def sleeps(folder):
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)


def runs_within(pid, seconds):
    """Whether a process is still there after some time; a zombie that nobody has waited for counts as gone."""
    state = Path("/proc", pid, "stat")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.05)
    return True


def test_ranks_end_with_the_test_that_waits_for_them(tmp_path):
    """As where it runs out of time: pytest-timeout raises from a signal."""

    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, give_up)
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        with pytest.raises(TimeoutError):
            run_ranks(sleeps, 2, tmp_path / "ranks", tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not any(runs_within((tmp_path / str(rank)).read_text(), 5.0) for rank in range(2))
    assert [one.result for one in run_ranks(lambda: os.environ["RANK"], 2, tmp_path / "again")] == ["0", "1"]
