"""Steps that act on files, processes, connections and threads."""

import contextlib
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from tests.zoo.classifier import Classifier


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
def open_before(checks: bool = True) -> Iterator[None]:
    """Open files and a pipe before a step, and find them as they were."""
    pipe = list(multiprocessing.Pipe())
    connections.append([[[[[[[[pipe]]]]]]]])  # too deep for what is noted before a step
    descriptors.update({"old.txt": os.open("old.txt", os.O_RDWR), "read": os.open("old/inner.txt", os.O_RDONLY)})
    files = {name: os.fstat(number).st_ino for name, number in descriptors.items()}
    try:
        yield
        if checks:
            assert {name: os.fstat(number).st_ino for name, number in descriptors.items()} == files
            assert all(os.lseek(number, 0, os.SEEK_CUR) == 0 for number in descriptors.values())
            assert not pipe[1].poll()
    finally:
        for number in descriptors.values():
            with contextlib.suppress(OSError):
                os.close(number)
        for connection in pipe:
            connection.close()
        connections.clear()


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
HARMFUL: dict[str, Callable[[Any], Any]] = {
    "a new file": lambda _: open("new.txt", "w").close(),
    "a longer file": lambda _: open("old.txt", "a").close(),
    "by os.open": lambda _: os.open("new.txt", os.O_CREAT | os.O_WRONLY),
    "by pathlib": lambda _: Path("old.txt").write_text("x"),
    "touch": lambda _: Path("old.txt").touch(),
    "torch.save": save_weights,
    "torch.jit": script,
    "safetensors": save_by_safetensors,
    "numpy": lambda _: np.save("a.npy", np.zeros(2)),
    "memory map": lambda _: np.memmap("old.txt", mode="r+"),
    "copy": lambda _: shutil.copy("old.txt", "copy.txt"),
    "remove": lambda _: os.remove("old.txt"),
    "remove a tree": lambda _: shutil.rmtree("old"),
    "rename": lambda _: os.rename("old.txt", "renamed.txt"),
    "replace atomically": write_atomically,
    "truncate": lambda _: os.truncate("old.txt", 1),
    "mode": lambda _: os.chmod("old.txt", 0o600),
    "folder": lambda _: os.makedirs("new/folder"),
    "link": lambda _: os.symlink("old.txt", "link"),
    "log file": lambda _: logging.FileHandler("run.log"),
    "database": lambda _: sqlite3.connect("runs.db"),
    "from a thread": write_from_thread,
    "from a pool": write_from_pool,
    "caught": write_and_go_on,
    "subprocess": lambda _: subprocess.run(["touch", "new.txt"], check=True),
    "shell": lambda _: os.system("touch new.txt"),
    "fork": lambda _: os.fork() or os._exit(0),
    "spawn": spawn,
    "signal": lambda _: os.kill(os.getpid(), 10),
    "connect": lambda _: socket.create_connection(("127.0.0.1", 9)),
    "by its number": write_by_number,
    "several buffers": lambda _: os.writev(descriptors["old.txt"], [b"x"]),
    "at a place": lambda _: os.pwrite(descriptors["old.txt"], b"x", 0),
    "from a file": lambda _: os.sendfile(descriptors["old.txt"], descriptors["read"], 0, 3),
    "shorten by its number": lambda _: os.ftruncate(descriptors["old.txt"], 1),
    "memory map by its number": lambda _: mmap.mmap(descriptors["old.txt"], 3),
    "close": lambda _: os.close(descriptors["old.txt"]),
    "replace a descriptor": lambda _: os.dup2(descriptors["read"], descriptors["old.txt"]),
    "read on": lambda _: os.read(descriptors["read"], 1),
    "pipe of the file system": lambda _: os.mkfifo("pipe"),
    "shared memory": share_memory,
    "torch.jit.save": save_function,
    "queue of the program": put_into_queue,
    "pipe to a process": send_through_pipe,
    "exit at once": lambda _: os._exit(0),
    "abort": lambda _: os.abort(),
    "listen": lambda _: socket.socket().bind(("127.0.0.1", 0)),
}


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
