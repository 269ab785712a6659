"""A trial step changes nothing outside of its copy."""

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_memfit.profile import seal as seal_module
from lightning_memfit.profile.background import in_child
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.copying import UncopiedError
from lightning_memfit.profile.seal import RefusedError, current_seal, sealed
from lightning_memfit.profile.trace import TraceError
from tests.truth.profile.modules import Classifier, batch
from tests.zoo.side_effects import HARMFUL, WAITING, Doing, contents, open_before, save_weights

LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's, in which everything runs, beside one for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "inner.txt").write_text("inner")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- what is refused --------------------------------------------------------------------------------------------------


WORDS = {
    "a new file": "writes to `new.txt`",
    "a longer file": "writes to `old.txt`",
    "by os.open": "writes to `new.txt`",
    "by pathlib": "writes to `old.txt`",
    "touch": "changes the times of",
    "torch.save": "writes to `best.pt`",
    "torch.jit": "writes to `scripted.pt`",
    "safetensors": "writes to `a.safetensors`",
    "numpy": "writes to `a.npy`",
    "memory map": "writes to `old.txt`",
    "copy": "writes to `copy.txt`",
    "remove": "removes",
    "remove a tree": "removes",
    "rename": "moves `old.txt` to `renamed.txt`",
    "replace atomically": "to `old.txt`",
    "truncate": "shortens",
    "mode": "changes the mode",
    "folder": "makes the folder",
    "link": "makes the link `link`",
    "log file": "run.log`",
    "database": "opens the database `runs.db`",
    "from a thread": "writes to `thread.txt`",
    "from a pool": "writes to `pool.txt`",
    "caught": "writes to `quiet.txt`",
    "subprocess": "starts a process (`touch new.txt`)",
    "shell": "starts a process (`touch new.txt`)",
    "fork": "starts a process",
    "spawn": "starts a process",
    "signal": "sends signal 10",
    "connect": "connects to",
    "by its number": "writes to `",
    "several buffers": "writes to `",
    "at a place": "writes to `",
    "from a file": "writes to `",
    "shorten by its number": "shortens",
    "memory map by its number": "maps memory to `",
    "close": "closes `",
    "replace a descriptor": "replaces `",
    "read on": "reads on in `",
    "pipe of the file system": "writes to `pipe`",
    "shared memory": "makes or removes shared memory",
    "torch.jit.save": "writes to `function.pt`",
    "queue of the program": "changes a queue that was there before",
    "pipe to a process": "sends data through a connection",
    "exit at once": "ends the program by `os._exit`",
    "abort": "ends the program by `os.abort`",
    "listen": "listens at",
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_harm_is_refused_with_its_line(profile: Callable[..., Any], name: str, folder: Path) -> None:
    before = contents(folder)
    with open_before(), pytest.raises(TraceError) as refused:
        profile(Doing(HARMFUL[name]), batch())
    assert WORDS[name] in str(refused.value)
    assert "side_effects.py, line " in str(refused.value)
    assert contents(folder) == before
    assert not os.listdir(tempfile.gettempdir())
    assert WAITING.empty()
    assert not Path("/dev/shm/memfit_test_seal").exists()


def test_hook_of_the_start_is_sealed_too(folder: Path) -> None:
    class Noting(Classifier):
        def setup(self, stage: str) -> None:
            self.more = torch.nn.Linear(2, 2)
            Path("sizes.txt").write_text("x")

        @override
        def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
            return self.loss(batch) + self.more.weight.sum()

    before = contents(folder)
    with pytest.raises(TraceError, match=r"sizes.txt.*in setup"):
        profile_module(Noting(), batch())
    assert contents(folder) == before


def test_write_at_a_later_step_costs_only_that_step(folder: Path) -> None:
    class Sampling(Classifier):
        @override
        def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
            if batch_idx % 500 == 499:
                torch.save({}, "sample.pt")
            return self.loss(batch)

    before = contents(folder)
    for profile in (profile_module(Sampling(), batch()), measure_step(Sampling(), batch())):
        assert any("sample.pt" in remark for remark in profile.remarks)
    assert contents(folder) == before


def test_hook_without_a_line_of_the_users_is_refused(folder: Path) -> None:
    class Hooked(Classifier):
        @override
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.register_step_post_hook(functools.partial(np.savez, "step"))
            return optimizer

    before = contents(folder)
    with pytest.raises(TraceError, match=r"writes to `step\.npz`"):
        measure_step(Hooked(), batch())
    assert contents(folder) == before


# --- what is not ------------------------------------------------------------------------------------------------------


def test_new_module_may_be_compiled_but_does_nothing_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "quiet_module.py").write_text("VALUE = 1\n")
    (folder / "loud_module.py").write_text("open('loud.txt', 'w')\n")
    monkeypatch.syspath_prepend(folder)
    measure_step(Doing(lambda _: __import__("quiet_module")), batch())
    with pytest.raises(TraceError, match=r"loud_module.py, line 1"):
        measure_step(Doing(lambda _: __import__("loud_module")), batch())
    assert not (folder / "loud.txt").exists()


def test_own_child_process_may_start() -> None:
    with sealed():
        assert in_child(lambda: 3)() == 3


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_work_is_not_given_to_threads_of_the_users(profile: Callable[..., Any], folder: Path) -> None:
    work: queue.Queue[Any] = queue.Queue()

    def write() -> None:
        while (text := work.get()) is not None:
            Path("served.txt").write_text(text)

    thread = threading.Thread(target=write)
    thread.start()
    loop = asyncio.new_event_loop()
    serving = threading.Thread(target=loop.run_forever)
    serving.start()
    acts = [
        lambda _: globals()["WORK"].put("x"),
        lambda _: globals()["LOOP"].call_soon_threadsafe(Path("served.txt").touch),
    ]
    globals().update(WORK=work, LOOP=loop)
    try:
        for act in acts:
            with pytest.raises(TraceError, match="gives work to a thread that was there before"):
                profile(Doing(act), batch())
    finally:
        del globals()["WORK"], globals()["LOOP"]
        work.put(None)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        serving.join()
        loop.close()
    assert not (folder / "served.txt").exists()


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_nothing_is_sent_through_an_open_connection(
    profile: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        act = Doing(lambda _: None)
        act.act = functools.partial(_send, [ours.fileno()])
        sockets[ours.fileno()] = ours
        with pytest.raises((TraceError, UncopiedError)):
            profile(act, batch())
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        sockets.clear()


sockets: dict[int, socket.socket] = {}


def _send(numbers: list[int], module: Any) -> None:
    sockets[numbers[0]].sendall(b"x")


def test_queues_of_the_step_may_be_used() -> None:
    def work(module: Any) -> None:
        waiting: queue.Queue[Any] = queue.Queue()
        thread = threading.Thread(target=waiting.get)
        thread.start()
        waiting.put(1)
        thread.join()

    measure_step(Doing(work), batch())


def test_other_threads_are_not_sealed(folder: Path) -> None:
    asked, written = threading.Event(), threading.Event()

    def write() -> None:
        asked.wait()
        Path("other.txt").write_text("x")
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    measure_step(Doing(lambda _: (asked.set(), written.wait())), batch())
    thread.join()
    assert (folder / "other.txt").read_text() == "x"


# --- what is muted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_nothing_is_printed_or_logged(
    profile: Callable[..., Any], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    profile(Doing(lambda _: (print("printed"), LOG.error("logged"))), batch())
    assert "printed" not in "".join(capsys.readouterr())
    assert "logged" not in caplog.text
    print("after")
    LOG.error("after")
    assert "after" in capsys.readouterr().out
    assert "after" in caplog.text


def test_nothing_is_left_to_do_at_the_end_of_the_process() -> None:
    measure_step(Classifier(), batch())  # whatever else registers functions has been imported
    before = atexit._ncallbacks()
    measure_step(Doing(lambda _: atexit.register(print, "late")), batch())
    assert atexit._ncallbacks() == before


# --- the seal itself --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unchanged_patches() -> Iterator[None]:
    places = [(torch._C, "PyTorchFileWriter"), (threading.Thread, "start"), (logging.Logger, "handle")]
    before = [vars(owner)[name] for owner, name in places]
    yield
    assert [vars(owner)[name] for owner, name in places] == before
    assert current_seal() is None


def test_seals_can_be_nested_and_come_off() -> None:
    with unchanged_patches(), pytest.raises(RefusedError, match="inner"), sealed():
        with contextlib.suppress(RefusedError), sealed():
            Path("inner.txt").write_text("x")
        assert current_seal() is not None
        Path("inner.txt").write_text("x")


def test_user_may_write_after_a_refusal(folder: Path) -> None:
    with unchanged_patches(), pytest.raises(TraceError):
        measure_step(Doing(save_weights), batch())
    torch.save({}, "best.pt")
    assert (folder / "best.pt").exists()


def test_a_seal_in_a_seal_leaves_everything_as_it_was():
    def patched():
        own = vars(socket.socket)
        return own.get("send"), own.get("sendall"), queue.Queue.put, threading.Thread.start

    before = patched()
    with sealed():
        outer = patched()
        with sealed():
            pass
        assert patched() == outer
    assert patched() == before


def test_a_thread_that_outlives_the_step_is_free_again(tmp_path):
    go, done = threading.Event(), threading.Event()

    def write_later():
        go.wait(10)
        (tmp_path / "late").write_text("x")
        done.set()

    with sealed():
        thread = threading.Thread(target=write_later, daemon=True)
        thread.start()
    go.set()
    assert done.wait(10)


def test_threads_that_outlive_a_step_hide_none_that_wait_for_work():
    leave, work = threading.Event(), queue.Queue()
    with sealed():
        left = threading.Thread(target=lambda: leave.wait(20), daemon=True)
        left.start()
    served = threading.Thread(target=work.get)
    served.start()
    try:
        while not work.not_empty._waiters:
            time.sleep(0.01)
        with pytest.raises(RefusedError, match="gives work to a thread that was there before"), sealed():
            work.put("x")
    finally:
        leave.set()
        work.put("x")
        served.join(10)
        left.join(10)


def test_a_forked_process_forgets_the_threads_of_its_parent(tmp_path):
    """A data loader's worker sends batches from a thread that may get the number of a sealed one."""
    holding, leave, others = threading.Event(), threading.Event(), set(seal_module._seals)

    def hold():
        holding.set()
        leave.wait(20)

    with sealed():
        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        holding.wait(10)
    assert len(set(seal_module._seals) - others) == 1
    pid = os.fork()
    if pid == 0:
        os._exit(len(seal_module._seals))
    assert os.waitpid(pid, 0)[1] == 0
    leave.set()
    thread.join(10)
    assert set(seal_module._seals) <= others


def test_a_forked_child_of_a_reading_step_ends_as_it_says(folder: Path) -> None:
    with seal_module.sealed(reading=True):
        child = os.fork()
        if child == 0:
            os._exit(status=7)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
