import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_memfit.profile import background
from lightning_memfit.profile.background import ForkedWorker, in_child
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


def test_what_a_child_was_killed_over_telling_is_done_here() -> None:
    here = os.getpid()

    def work() -> tuple[int, bytes]:
        if os.getpid() != here:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return os.getpid(), bytes(1 << 22)  # more than a pipe holds

    before = multiprocessing.active_children()
    result = in_child(work)
    (child,) = (one for one in multiprocessing.active_children() if one not in before)
    child.join(60)
    assert not child.is_alive()
    assert result()[0] == here


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
from lightning_memfit.profile.background import ForkedWorker, in_child

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


class Unpicklable:
    """Its copy holds what can't be pickled; those that both processes share needn't be."""

    def __init__(self) -> None:
        self.value, self.secret = 3, lambda: None


def place_of(*objects: object) -> tuple[int, int]:
    return os.getpid(), sum(id(one) for one in objects)


def value_of(one: Unpicklable, added: int) -> tuple[int, int]:
    return os.getpid(), one.value + added


class TwoArguments(RuntimeError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}, {second}")


class NotReadBack:
    def __reduce__(self) -> tuple[type, tuple[str]]:
        return NotReadBack, ("an argument that it doesn't take",)


def read_back(one: NotReadBack) -> int:
    return os.getpid()


def made(what: str) -> object:
    if what == "other arguments":
        raise TwoArguments("one", "two")
    if what == "error":
        raise TraceError("values of tensors", ("an assumption",))
    return (lambda: None) if what == "unpicklable" else torch.arange(1 << 20).numpy()


def killed_unless(here: int) -> int:
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def _worker(*shared: object) -> ForkedWorker:
    if not _runs_autograd_in_children():
        pytest.skip("a CUDA build refuses backward passes in children once this process has run one")
    return ForkedWorker(*shared)


def test_a_worker_is_one_process_that_has_what_was_there_at_its_fork() -> None:
    module, other = torch.nn.Linear(2, 2), Unpicklable()
    worker = _worker(module, other)
    before = place_of(module, other)
    first, second = (worker.start(partial(place_of, module, other)) for _ in range(2))
    third = worker.start(partial(value_of, other, 4))
    assert first()[0] != before[0]
    assert second() == (worker.start(partial(place_of, module, other)))()  # the same process, the same objects
    assert third()[1] == 7


def test_results_of_a_worker_are_had_in_any_order_and_need_not_be_asked_for() -> None:
    worker = _worker(Unpicklable())
    started = [worker.start(partial(made, "large")) for _ in range(4)]  # each result is more than a pipe holds
    assert started[3]() is not None
    assert len(started[1]()) == 1 << 20  # type: ignore[arg-type]
    assert worker.start(partial(made, "large"))() is not None


def test_errors_of_a_worker_are_raised_here_and_what_it_cannot_send_is_made_here() -> None:
    worker = _worker()
    failing, unsendable = worker.start(partial(made, "error")), worker.start(partial(made, "unpicklable"))
    with pytest.raises(TraceError, match="values of tensors") as caught:
        failing()
    assert caught.value.assumptions == ("an assumption",)
    assert callable(unsendable())
    with pytest.raises(TwoArguments, match="one, two"):
        worker.start(partial(made, "other arguments"))()
    assert worker.start(partial(read_back, NotReadBack()))() == os.getpid()
    assert worker.start(os.getpid)() != os.getpid()  # it lives on


def test_what_a_worker_cannot_be_given_runs_in_a_fork_of_its_own() -> None:
    shared, strange = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    worker = _worker(shared)
    process = worker.start(partial(place_of, shared))()[0]
    for function in (partial(place_of, strange), partial(value_of, Unpicklable(), 1), lambda: (os.getpid(), 0)):
        assert worker.start(function)()[0] not in (process, os.getpid())


def test_a_killed_worker_leaves_all_to_this_process() -> None:
    worker, here = _worker(), os.getpid()
    killed, after = worker.start(partial(killed_unless, here)), worker.start(os.getpid)
    assert killed() == 7
    assert after() == here
    assert worker.start(os.getpid)() == here


def test_no_worker_where_a_fork_is_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert ForkedWorker().start(os.getpid)() == os.getpid()


def test_a_worker_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    script = """
import os, sys, signal
from functools import partial
from lightning_memfit.profile.background import ForkedWorker
worker = ForkedWorker()
print(worker.start(os.getpid)(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    process = int(done.stdout)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process}").exists() and _state(process) != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists() or _state(process) == "Z"


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_an_interrupted_wait_ends_the_child() -> None:
    script = """
import signal, time
from functools import partial
from lightning_memfit.profile.background import in_child
wait = in_child(partial(time.sleep, 300))
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.5)  # Ctrl-C for this process alone
try:
    wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\n"
