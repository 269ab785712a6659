"""A trial step changes nothing outside of its copy."""

import asyncio
import atexit
import contextlib
import functools
import hashlib
import logging
import mmap
import multiprocessing
import os
import queue
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
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

LOG = logging.getLogger(__name__)


class Doing(Classifier):
    """Does something in every step.

    Args:
        act: What to do, with the module.
    """

    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.act = act

    @override
    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        self.act(self)
        return self.loss(batch)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's, in which everything runs, beside one for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "inner.txt").write_text("inner")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, Any]:
    """Digest, mode and times of everything in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


descriptors: dict[str, int] = {}
connections: list[Any] = []


@contextlib.contextmanager
def open_before() -> Iterator[None]:
    """Open files and a pipe before a step, and find them as they were."""
    pipe = list(multiprocessing.Pipe())
    connections.append([[[[[[[[pipe]]]]]]]])  # too deep for what is noted before a step
    descriptors.update({"old.txt": os.open("old.txt", os.O_RDWR), "read": os.open("old/inner.txt", os.O_RDONLY)})
    files = {name: os.fstat(number).st_ino for name, number in descriptors.items()}
    try:
        yield
        assert {name: os.fstat(number).st_ino for name, number in descriptors.items()} == files
        assert all(os.lseek(number, 0, os.SEEK_CUR) == 0 for number in descriptors.values())
        assert not pipe[1].poll()
    finally:
        for number in descriptors.values():
            os.close(number)
        for connection in pipe:
            connection.close()
        connections.clear()


# --- what is refused --------------------------------------------------------------------------------------------------


def save_weights(module: Any) -> None:
    torch.save({"epoch": module.current_epoch}, "best.pt")


def write_from_thread(module: Any) -> None:
    thread = threading.Thread(target=lambda: Path("thread.txt").write_text("x"))
    thread.start()
    thread.join()


def write_from_pool(module: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(Path("pool.txt").write_text, "x")


def write_and_go_on(module: Any) -> None:
    with contextlib.suppress(BaseException):
        Path("quiet.txt").write_text("x")


def write_atomically(module: Any) -> None:
    descriptor, name = tempfile.mkstemp(dir=".")
    os.close(descriptor)
    os.replace(name, "old.txt")


def save_by_safetensors(module: Any) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(2)}, "a.safetensors")


def spawn(module: Any) -> None:
    multiprocessing.get_context("spawn").Process(target=print).start()


def script(module: Any) -> None:
    torch.jit.script(torch.nn.Linear(1, 1)).save("scripted.pt")


def write_by_number(module: Any) -> None:
    os.write(descriptors["old.txt"], b"x")


def share_memory(module: Any) -> None:
    shared_memory.SharedMemory(create=True, size=10, name="memfit_test_seal")


def save_function(module: Any) -> None:
    torch.jit.save(torch.jit.script(add_one), "function.pt")


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def put_into_queue(module: Any) -> None:
    WAITING.put(1)


def send_through_pipe(module: Any) -> None:
    innermost(connections)[0].send("x")


def innermost(nested: list[Any]) -> list[Any]:
    return innermost(nested[0]) if isinstance(nested[0], list) else nested


WAITING: queue.Queue[int] = queue.Queue()

REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a new file": (lambda _: open("new.txt", "w").close(), "writes to `new.txt`"),
    "a longer file": (lambda _: open("old.txt", "a").close(), "writes to `old.txt`"),
    "by os.open": (lambda _: os.open("new.txt", os.O_CREAT | os.O_WRONLY), "writes to `new.txt`"),
    "by pathlib": (lambda _: Path("old.txt").write_text("x"), "writes to `old.txt`"),
    "touch": (lambda _: Path("old.txt").touch(), "changes the times of"),
    "torch.save": (save_weights, "writes to `best.pt`"),
    "torch.jit": (script, "writes to `scripted.pt`"),
    "safetensors": (save_by_safetensors, "writes to `a.safetensors`"),
    "numpy": (lambda _: np.save("a.npy", np.zeros(2)), "writes to `a.npy`"),
    "memory map": (lambda _: np.memmap("old.txt", mode="r+"), "writes to `old.txt`"),
    "copy": (lambda _: shutil.copy("old.txt", "copy.txt"), "writes to `copy.txt`"),
    "remove": (lambda _: os.remove("old.txt"), "removes"),
    "remove a tree": (lambda _: shutil.rmtree("old"), "removes"),
    "rename": (lambda _: os.rename("old.txt", "renamed.txt"), "moves `old.txt` to `renamed.txt`"),
    "replace atomically": (write_atomically, "to `old.txt`"),
    "truncate": (lambda _: os.truncate("old.txt", 1), "shortens"),
    "mode": (lambda _: os.chmod("old.txt", 0o600), "changes the mode"),
    "folder": (lambda _: os.makedirs("new/folder"), "makes the folder"),
    "link": (lambda _: os.symlink("old.txt", "link"), "makes the link `link`"),
    "log file": (lambda _: logging.FileHandler("run.log"), "run.log`"),
    "database": (lambda _: sqlite3.connect("runs.db"), "opens the database `runs.db`"),
    "from a thread": (write_from_thread, "writes to `thread.txt`"),
    "from a pool": (write_from_pool, "writes to `pool.txt`"),
    "caught": (write_and_go_on, "writes to `quiet.txt`"),
    "subprocess": (lambda _: subprocess.run(["touch", "new.txt"], check=True), "starts a process (`touch new.txt`)"),
    "shell": (lambda _: os.system("touch new.txt"), "starts a process (`touch new.txt`)"),
    "fork": (lambda _: os.fork() or os._exit(0), "starts a process"),
    "spawn": (spawn, "starts a process"),
    "signal": (lambda _: os.kill(os.getpid(), 10), "sends signal 10"),
    "connect": (lambda _: socket.create_connection(("127.0.0.1", 9)), "connects to"),
    "by its number": (write_by_number, "writes to `"),
    "several buffers": (lambda _: os.writev(descriptors["old.txt"], [b"x"]), "writes to `"),
    "at a place": (lambda _: os.pwrite(descriptors["old.txt"], b"x", 0), "writes to `"),
    "from a file": (lambda _: os.sendfile(descriptors["old.txt"], descriptors["read"], 0, 3), "writes to `"),
    "shorten by its number": (lambda _: os.ftruncate(descriptors["old.txt"], 1), "shortens"),
    "memory map by its number": (lambda _: mmap.mmap(descriptors["old.txt"], 3), "maps memory to `"),
    "close": (lambda _: os.close(descriptors["old.txt"]), "closes `"),
    "replace a descriptor": (lambda _: os.dup2(descriptors["read"], descriptors["old.txt"]), "replaces `"),
    "read on": (lambda _: os.read(descriptors["read"], 1), "reads on in `"),
    "pipe of the file system": (lambda _: os.mkfifo("pipe"), "writes to `pipe`"),
    "shared memory": (share_memory, "makes or removes shared memory"),
    "torch.jit.save": (save_function, "writes to `function.pt`"),
    "queue of the program": (put_into_queue, "changes a queue that was there before"),
    "pipe to a process": (send_through_pipe, "sends data through a connection"),
    "exit at once": (lambda _: os._exit(0), "ends the program by `os._exit`"),
    "abort": (lambda _: os.abort(), "ends the program by `os.abort`"),
    "listen": (lambda _: socket.socket().bind(("127.0.0.1", 0)), "listens at"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_harm_is_refused_with_its_line(profile: Callable[..., Any], name: str, folder: Path) -> None:
    act, words = REFUSED[name]
    before = contents(folder)
    with open_before(), pytest.raises(TraceError) as refused:
        profile(Doing(act), batch())
    assert words in str(refused.value)
    assert "test_seal.py, line " in str(refused.value)
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


def make_temporary_files(module: Any) -> None:
    with tempfile.TemporaryDirectory() as made:
        torch.save({}, f"{made}/a.pt")
        os.rename(f"{made}/a.pt", f"{made}/b.pt")
    tempfile.mkstemp()
    tempfile.mkdtemp()
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    with tempfile.TemporaryFile() as file:
        file.write(b"x")


def import_module(module: Any) -> None:
    import xmlrpc.client  # noqa: F401  (whatever was not imported before)


def use_descriptors(module: Any) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x")
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    with tempfile.TemporaryFile() as file:
        file.write(b"abc")
        file.flush()
        mmap.mmap(file.fileno(), 3).close()
    multiprocessing.Value("i").value = 1  # type: ignore[attr-defined]
    mmap.mmap(-1, 10).close()


ALLOWED: dict[str, Callable[[Any], Any]] = {
    "temporary files": make_temporary_files,
    "nothing": lambda _: open(os.devnull, "w").close(),
    "reading": lambda _: Path("old.txt").read_text(),
    "folder that exists": lambda _: os.makedirs("old", exist_ok=True),
    "file that doesn't exist": lambda _: Path("new.txt").unlink(missing_ok=True),
    "database in memory": lambda _: sqlite3.connect(":memory:").close(),
    "import": import_module,
    "descriptors": use_descriptors,
    "read a memory map": lambda _: np.memmap("old.txt", mode="r")[0],
    "thread": lambda _: threading.Thread(target=sum, args=([1, 2],)).start(),
}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_harmless_operations_are_not_refused(profile: Callable[..., Any], name: str, folder: Path) -> None:
    before = contents(folder)
    profile(Doing(ALLOWED[name]), batch())
    assert contents(folder) == before
    assert not os.listdir(tempfile.gettempdir())


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
