import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_memfit.profile import background
from lightning_memfit.profile.background import in_child
from lightning_memfit.profile.trace import TraceError


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # the test runner has its own


def _runs_autograd_in_children() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if background._autograd_works() else 1)
    return os.waitpid(child, 0)[1] == 0


def test_the_function_runs_in_another_process_meanwhile(tmp_path: Path) -> None:
    if not _runs_autograd_in_children():
        pytest.skip(
            "a backward pass was run in this process before, after which a CUDA build refuses others in children"
        )
    done, here = tmp_path / "done", os.getpid()

    def work() -> int:
        if os.getpid() != here:
            done.touch()
        return os.getpid()

    result = in_child(work)
    deadline = time.monotonic() + 60
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done.exists()  # before anyone asked
    assert result() != here


def test_its_exception_is_raised_here() -> None:
    def fail() -> None:
        raise TraceError("values of tensors", ("an assumption",))

    with pytest.raises(TraceError, match="values of tensors") as caught:
        in_child(fail)()
    assert caught.value.assumptions == ("an assumption",)


def test_what_a_killed_child_left_undone_is_done_here() -> None:
    here = os.getpid()

    def work() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    assert in_child(work)() == 7


@pytest.mark.parametrize("obstacle", ["threads", "cores", "cuda"])
def test_no_fork_where_it_is_not_safe(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if obstacle == "threads":
        monkeypatch.setattr(threading, "active_count", lambda: 2)
    elif obstacle == "cores":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    else:
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert in_child(os.getpid)() == os.getpid()


PARALLEL_IN_BOTH = """
import torch
from lightning_memfit.profile import background
from lightning_memfit.profile.background import in_child

torch.set_num_threads(2)
rows = torch.arange(1 << 20)

def work():
    return int(rows[torch.arange(1 << 20)].sum())

here = work()  # starts the threads that a forked process lacks
assert in_child(work)() == here
assert torch.get_num_threads() == 2
"""


def test_parallel_operators_run_in_a_fork_of_a_process_that_ran_some() -> None:
    subprocess.run([sys.executable, "-c", PARALLEL_IN_BOTH], check=True, timeout=60)


def backward(*_: object) -> int:
    torch.ones((), requires_grad=True).backward()
    return os.getpid()


def test_a_backward_pass_runs_after_one_in_this_process() -> None:
    """Builds for CUDA refuse it in a process that is forked after the first one, so that it has to run here."""
    backward()
    assert in_child(backward)() > 0


def test_a_child_without_autograd_leaves_the_work_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    here, works = os.getpid(), torch.Tensor.backward

    def refusing(tensor: torch.Tensor) -> None:
        if os.getpid() != here:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        works(tensor)

    monkeypatch.setattr(torch.Tensor, "backward", refusing)
    assert in_child(backward)() == here
