"""What runs in a process that is thrown away changes nothing here, whatever it does."""

import contextlib
import contextvars
import gc
import hashlib
import logging
import mmap
import multiprocessing
import os
import queue
import random
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memfit.profile import process
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.process import LostError, NoProcessError, RefusedError, Worker, run
from lightning_memfit.profile.trace import Emulation, TraceError
from tests.helpers.trainers import fit
from tests.truth.profile.modules import Classifier, batch


def ends(function: Callable[[], Any], seconds: float | None = 20.0) -> str:
    """What a function's process ends with, in words."""
    try:
        return f"returned {run(function, seconds)!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def turn_for_ever() -> NoReturn:
    while True:
        pass


class TakesTwo(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_of_two() -> None:
    raise TakesTwo(1, 2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 3, "returned 3"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (raise_of_two, "TakesTwo: 1 and 2"),
        (lambda: os._exit(3), r"LostError: it ended its process \(exit code 3\)"),
        (os.abort, r"LostError: it ended its process \(signal 6\)"),
        (lambda: sys.exit(4), r"LostError: it ended the program \(SystemExit: 4\)"),
        (lambda: lambda: 0, "LostError: what it returned .*pickle"),
    ],
)
def test_an_answer_or_how_the_process_ended(function: Callable[[], Any], words: str) -> None:
    assert re.match(words, ends(function)), ends(function)


@pytest.mark.parametrize("loop", [turn_for_ever, lambda: re.match(r"(a+)+$", "a" * 40 + "b")], ids=["Python", "C"])
def test_what_does_not_end_is_ended_and_its_line_named(loop: Callable[[], Any]) -> None:
    assert re.search(r"LostError: it was ended after 0.5 s at .*test_process.py:\d+", ends(loop, 0.5))


class Profiles(pl.Callback):
    """Profiles in `setup`, which is also called in what it profiles."""

    profile: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.profile = profile_module(pl_module, batch(), any_micro_batch=False)


def test_a_callback_that_profiles_is_left_out_of_its_own_profile() -> None:
    callback = Profiles()
    fit(Classifier(), callback, loader=torch.utils.data.DataLoader([batch()], batch_size=None), max_steps=1)
    assert any("Profiles acts in a step" in remark for remark in callback.profile.remarks)


def test_a_held_lock_costs_a_fork_and_not_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_READY_S", 0.3)
    forks: list[int] = []
    usable = process._is_usable

    def hang_once(backward: bool) -> bool:
        if len(forks) == 1:
            time.sleep(60)
        return usable(backward)

    fork = os.fork
    monkeypatch.setattr(process, "_is_usable", hang_once)
    monkeypatch.setattr(os, "fork", lambda: forks.append(0) or fork())
    assert run(lambda: 7) == 7
    assert len(forks) == 2


def test_where_a_fork_runs_no_backward_pass_a_new_process_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = {"emulation": Emulation("cpu"), "any_micro_batch": False}
    forked = profile_module(Classifier(), batch(), **settings)
    monkeypatch.setattr(process, "_is_usable", lambda backward: not backward)
    with pytest.raises(NoProcessError, match="backward pass"):
        run(lambda: 7)
    spawned = profile_module(Classifier(), batch(), **settings)
    assert spawned.events.live_bytes().max() == forked.events.live_bytes().max()
    with pytest.raises(TraceError, match="can't be sent.*memfit estimate"):  # a function of a test can't be pickled
        profile_module(Doing(lambda: None), batch(), **settings)


@pytest.mark.parametrize("profile", [partial(profile_module, emulation=Emulation("cpu")), measure_step])
def test_without_forks_a_process_that_ends_after_its_traces_runs_them_on_copies(
    profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Classifier()
    forked = profile(module, batch())
    weights = [weight.clone() for weight in module.parameters()]
    monkeypatch.setattr(process, "_ends_after_traces", True)
    monkeypatch.setattr(process, "_has_forks", lambda: False)
    copied = profile(module, batch())
    assert (copied.events.sizes == forked.events.sizes).all()
    assert all(torch.equal(weight, before) for weight, before in zip(module.parameters(), weights, strict=True))
    with pytest.raises(TraceError, match="can't be forked"):
        profile(Doing(lambda: None), batch())


def test_a_process_on_a_device_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(NoProcessError):
        run(lambda: 7)


def length(values: list[int], more: int = 0) -> int:
    return len(values) + more


def test_a_worker_has_what_was_shared_as_it_was() -> None:
    values = [1, 2]
    worker = Worker(values)
    values.append(3)
    assert worker.run(partial(length, values, more=1)) == 3
    assert worker.run(partial(run, partial(length, values))) == 2
    with pytest.raises(NoProcessError, match="can't be sent"):
        worker.run(lambda: 1)
    with pytest.raises(ZeroDivisionError):
        worker.run(partial(divmod, 1, 0))
    worker.close()
    with pytest.raises(LostError):
        worker.run(partial(length, values))


def test_a_trace_works_after_a_backward_pass_and_beside_threads() -> None:
    Classifier().loss(batch()).backward()
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert profile_module(Classifier(), batch(), any_micro_batch=False).flops
    finally:
        ended.set()


# --- this process is as it was ----------------------------------------------------------------------------------------


class Doing(Classifier):
    """Does something in every step.

    Args:
        act: What to do.
    """

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.act()
        return self.loss(batch)


class Held:
    """What a step of somebody's may reach."""

    count = 0
    cached: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.numbers = np.zeros(3)
        self.tensor = torch.zeros(3)
        self.iterator = iter(range(10))
        self.waiting: queue.Queue[int] = queue.Queue()
        self.last: deque[int] = deque(maxlen=3)
        self.weak: weakref.WeakSet[Any] = weakref.WeakSet()
        self.variable = contextvars.ContextVar("held", default=0)
        self.generator = (number for number in range(10))
        self.random = random.Random(0)
        self.buffer = bytearray(3)
        self.lock = threading.Lock()


HELD = Held()


def change_numbers() -> None:
    global HELD
    Held.count += 1
    Held.cached["a"] = torch.ones(2)
    HELD.numbers += 1
    HELD.tensor.data = torch.ones(3)
    HELD.buffer[0] = 1
    HELD.last.append(1)
    HELD = Held()


def move_on() -> None:
    next(HELD.iterator)
    next(HELD.generator)
    HELD.waiting.put(1)
    HELD.variable.set(3)
    HELD.random.random()
    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(())
    HELD.lock.acquire(blocking=False)


def change_settings() -> None:
    torch.set_default_dtype(torch.float64)
    os.environ["MEMFIT_TEST"] = "1"
    os.umask(0)
    logging.getLogger().setLevel(1)
    torch.nn.functional.silu = torch.nn.functional.gelu
    sys.path.append("here")


def seen() -> list[Any]:
    """What the functions above change."""
    held = HELD
    of_numpy: Any = np.random.get_state()  # noqa: NPY002
    return [
        *(id(held), Held.count, dict(Held.cached), held.numbers.tolist(), held.tensor.tolist(), bytes(held.buffer)),
        *(list(held.last), held.waiting.qsize(), held.variable.get(), held.random.getstate(), held.lock.locked()),
        *(held.iterator.__length_hint__(), held.generator.gi_frame.f_lasti, random.getstate()),  # type: ignore[attr-defined]
        *(of_numpy[1].tolist(), torch.get_rng_state().tolist(), torch.get_default_dtype(), dict(os.environ)),
        *(logging.getLogger().level, torch.nn.functional.silu.__name__, list(sys.path), os.umask(os.umask(0o22))),
    ]


@pytest.mark.parametrize("act", [change_numbers, move_on, change_settings])
@pytest.mark.parametrize("profile", [partial(profile_module, emulation=Emulation("cpu")), measure_step])
def test_what_a_step_changes_in_memory_goes_with_its_process(profile: Any, act: Any) -> None:
    module, data = Doing(act), batch()
    before = seen()
    profile(module, data)
    assert [name for name, one in enumerate(seen()) if one != before[name]] == []


def test_no_trace_leaves_anything_in_this_process() -> None:
    """Fake tensors, patched functions and audit hooks: none, and the module is as it was."""
    module = Classifier()
    names = (torch, torch.nn.functional, torch.Tensor, torch.nn.Module, torch._VF, FakeTensor, torch.random)
    before = [dict(vars(owner)) for owner in names]
    weights = {name: weight.clone() for name, weight in module.named_parameters()}
    attributes = {id(child): dict(vars(child)) for child in module.modules()}
    profile_module(module, batch(), emulation=Emulation("cpu"))
    measure_step(module, batch())
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is FakeTensor]
    assert [dict(vars(owner)) for owner in names] == before
    assert {id(child): dict(vars(child)) for child in module.modules()} == attributes
    assert all(torch.equal(weight, weights[name]) for name, weight in module.named_parameters())
    (Path(tempfile.gettempdir()) / "memfit-not-refused").write_text("x")  # no hook refuses it
    (Path(tempfile.gettempdir()) / "memfit-not-refused").unlink()


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's with files that are open, in which everything runs."""
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "inner.txt").write_text("inner")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    monkeypatch.chdir(tmp_path)
    OPEN.update({"write": os.open("old.txt", os.O_RDWR), "read": os.open("old/inner.txt", os.O_RDONLY)})
    OPEN["from"], OPEN["to"] = os.pipe()
    os.set_blocking(OPEN["from"], False)
    yield tmp_path
    for number in OPEN.values():
        os.close(number)
    OPEN.clear()


OPEN: dict[str, int] = {}


def contents(folder: Path) -> list[Any]:
    """Everything in a folder, where its open files are, and what waits in its pipe."""
    found: list[Any] = [os.lseek(OPEN[name], 0, os.SEEK_CUR) for name in ("write", "read")]
    with contextlib.suppress(BlockingIOError):
        found.append(os.read(OPEN["from"], 10))
    for path in sorted(folder.rglob("*")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found.append((str(path), path.stat().st_mode, path.stat().st_mtime_ns, digest))
    return found


def save_by_safetensors() -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(2)}, "a.safetensors")


def write_from_thread() -> None:
    thread = threading.Thread(target=lambda: Path("thread.txt").write_text("x"))
    thread.start()
    thread.join()


def write_from_pool() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(Path("pool.txt").write_text, "x")


def replace_atomically() -> None:
    descriptor, name = tempfile.mkstemp(dir=".")
    os.close(descriptor)
    os.replace(name, "old.txt")


def write_and_go_on() -> None:
    with contextlib.suppress(BaseException):
        Path("quiet.txt").write_text("x")


HARM: dict[str, Callable[[], Any]] = {
    "a new file": lambda: open("new.txt", "w").close(),
    "a longer file": lambda: open("old.txt", "a").close(),
    "by os.open": lambda: os.open("new.txt", os.O_CREAT | os.O_WRONLY),
    "touch": lambda: Path("old.txt").touch(),
    "torch.save": lambda: torch.save({"epoch": 1}, "best.pt"),
    "torch.jit": lambda: torch.jit.script(torch.nn.Linear(1, 1)).save("scripted.pt"),
    "safetensors": save_by_safetensors,
    "numpy": lambda: np.save("a.npy", np.zeros(2)),
    "memory map": lambda: np.memmap("old.txt", mode="r+"),
    "copy": lambda: shutil.copy("old.txt", "copy.txt"),
    "remove": lambda: os.remove("old.txt"),
    "remove a tree": lambda: shutil.rmtree("old"),
    "rename": lambda: os.rename("old.txt", "renamed.txt"),
    "replace atomically": replace_atomically,
    "truncate": lambda: os.truncate("old.txt", 1),
    "mode": lambda: os.chmod("old.txt", 0o600),
    "folder": lambda: os.makedirs("new/folder"),
    "link": lambda: os.symlink("old.txt", "link"),
    "log file": lambda: logging.FileHandler("run.log"),
    "database": lambda: sqlite3.connect("runs.db"),
    "from a thread": write_from_thread,
    "from a pool": write_from_pool,
    "caught": write_and_go_on,
    "subprocess": lambda: subprocess.run(["touch", "new.txt"], check=True),
    "shell": lambda: os.system("touch new.txt"),
    "fork": lambda: os.fork() or os._exit(0),
    "spawn": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "signal": lambda: os.kill(os.getppid(), 10),
    "connect": lambda: socket.create_connection(("127.0.0.1", 9)),
    "listen": lambda: socket.socket().bind(("127.0.0.1", 0)),
    "by its number": lambda: os.write(OPEN["write"], b"x"),
    "several buffers": lambda: os.writev(OPEN["write"], [b"x"]),
    "at a place": lambda: os.pwrite(OPEN["write"], b"x", 0),
    "from a file": lambda: os.sendfile(OPEN["write"], OPEN["read"], 0, 3),
    "shorten by its number": lambda: os.ftruncate(OPEN["write"], 1),
    "memory map by its number": lambda: mmap.mmap(OPEN["write"], 3),
    "close": lambda: os.close(OPEN["write"]),
    "replace a descriptor": lambda: os.dup2(OPEN["read"], OPEN["write"]),
    "read on": lambda: os.read(OPEN["read"], 1),
    "pipe": lambda: os.write(OPEN["to"], b"x"),
    "pipe of the file system": lambda: os.mkfifo("pipe"),
    "shared memory": lambda: shared_memory.SharedMemory(create=True, size=10, name="memfit_test_process"),
    "exit at once": lambda: os._exit(0),
    "abort": os.abort,
}


def in_a_step(profile: Any) -> Callable[[Any], Any]:
    def act(harm: Any) -> None:
        with contextlib.suppress(Exception):  # refused, or with the error that its process got
            profile(Doing(harm), batch())

    return act


@pytest.mark.parametrize(
    "act",
    [
        ends,
        pytest.param(in_a_step(profile_module), marks=pytest.mark.nightly),
        pytest.param(in_a_step(measure_step), marks=pytest.mark.nightly),
    ],
    ids=["run", "profile_module", "measure_step"],
)
@pytest.mark.parametrize("name", HARM)
def test_harm_stays_inside(name: str, act: Callable[[Any], Any], folder: Path) -> None:
    before, files = contents(folder), os.listdir(tempfile.gettempdir())
    act(HARM[name])
    assert contents(folder) == before
    assert os.listdir(tempfile.gettempdir()) == files
    assert not Path("/dev/shm/memfit_test_process").exists()


@pytest.mark.parametrize("name", ["a new file", "remove", "subprocess", "connect"])
@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_harm_is_refused_with_its_line(profile: Any, name: str, folder: Path) -> None:
    words = {"a new file": "write to 'new.txt'", "remove": "write to 'old.txt'", "subprocess": "start a process"}
    with pytest.raises(TraceError, match=f"it would {words.get(name, 'connect to')}.* at .*test_process.py:"):
        profile(Doing(HARM[name]), batch())


def make_temporary_files() -> None:
    with tempfile.TemporaryDirectory() as made:
        torch.save({}, f"{made}/a.pt")
        os.rename(f"{made}/a.pt", f"{made}/b.pt")
    tempfile.mkstemp()
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")


@pytest.mark.parametrize(
    "harmless",
    [
        make_temporary_files,
        lambda: open(os.devnull, "w").close(),
        lambda: Path("old.txt").read_text() and None,
        lambda: os.makedirs("old", exist_ok=True),
        lambda: Path("new.txt").unlink(missing_ok=True),
        lambda: sqlite3.connect(":memory:").close(),
        lambda: threading.Thread(target=sum, args=([1, 2],)).start(),
    ],
)
def test_what_harms_nobody_is_allowed(harmless: Any, folder: Path) -> None:
    run(harmless)


def test_refusals_pass_by_handlers_of_errors() -> None:
    def write() -> None:
        with contextlib.suppress(Exception):
            Path("/tmp/never").write_text("x")

    with pytest.raises(RefusedError, match=r"write to '/tmp/never'"):
        run(write)
