"""`sealed`: while a trace or a measured step runs, the user's code does nothing outside of its copy.

A trial step runs the user's hooks on a copy, but a file that they write is the user's own, and so is a process that
they start or a connection that they open. Python reports these to audit hooks before they happen, and one hook of ours,
added at the first use and idle without a seal, refuses them: with a `RefusedError`, which is no `Exception`, so that no
handler in between goes on. What is refused in spite of that comes to light at the end.

What is not refused, by the nearest code below an operation that decides:

- what Python's import system does, and what fills a cache that the program would fill again (`_FILL_CACHES`);
- what this package does itself, such as saving a profile;
- temporary files, made by `tempfile`; those that a step leaves behind are removed with the seal;
- what changes nothing: a folder that exists is made again, or a file that doesn't exist is removed.

What isn't audited is asked for in its place: native code that opens files (`_NATIVE_WRITERS`), what is done by the
number of a file or connection that was open before (`_sealed_descriptors`), shared memory, and what is put into a queue
of the program or taken from it, or waits in an event loop or a socket for another thread or machine. What is printed or
logged by the user's code goes nowhere, as it would appear again in training, and so do functions that it registers to
run at the end of the process.

What is not caught: functions of C libraries that are called through `ctypes`, or by extension modules that are not
listed; functions of `os` that were imported by their name, `from os import write`, before the step; and files that a
library holds open and writes through their Python object.
"""

import atexit
import copy
import functools
import logging
import mmap
import os
import queue
import shutil
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import islice
from threading import get_ident
from types import FrameType, ModuleType
from typing import Any

from lightning_memfit.profile.culprit import owner_of, owner_of_frame, place_of, running_frames
from lightning_memfit.profile.replaced import replaced

_FILL_CACHES = (
    "importlib._bootstrap",
    "torch._inductor",
    "torch.hub",
    "torch.utils.cpp_extension",
    "triton",
    "numba",
    "huggingface_hub.file_download",
    "transformers.dynamic_module_utils",
    "datasets.arrow_dataset",
    "datasets.builder",
    "datasets.load",
)
"""Modules that write what they have compiled or downloaded, to read it the next time."""

_NATIVE_WRITERS = (
    ("torch._C", "PyTorchFileWriter"),  # below `torch.save`
    ("torch._C", "ScriptFunction.save"),
    ("torch._C", "ScriptModule.save"),
    ("torch._C", "ScriptModule._save_for_mobile"),
    ("torch._C", "_save_mobile_module"),
    ("torch._C", "_save_jit_module"),
    ("torch._C", "_save_parameters"),
    ("torch.jit._script", "RecursiveScriptModule.save"),
    ("torch.jit._script", "RecursiveScriptModule._save_for_lite_interpreter"),
    ("torch.autograd.profiler", "profile.export_chrome_trace"),
    ("safetensors.torch", "serialize_file"),
    ("safetensors.numpy", "serialize_file"),
    ("pyarrow.parquet.core", "ParquetWriter.__init__"),
    ("cv2", "imwrite"),
    ("soundfile", "write"),
)
"""Module and name of functions that open a file, given by its path, in native code."""

_OPENED = "lightning_memfit.open"
"""The audit event of a native writer, whose argument is the path."""

_STARTED = "lightning_memfit.start"
"""The audit event of a process of `multiprocessing`, whose start method need not be audited."""


_HANDED = "lightning_memfit.hand"
"""The audit event of work that is given to a thread which was there before, and may write or log."""


_SENT = "lightning_memfit.send"
"""The audit event of data that are sent through a socket which was connected before."""

_USED = "lightning_memfit.descriptor"
"""The audit event of a function of `os` on a descriptor, with its name, the descriptor and what it does."""

_SHARED = "lightning_memfit.shared"
"""The audit event of memory that is shared with other processes, with its name."""

_QUEUED = "lightning_memfit.queue"
"""The audit event of a queue that was there before."""

_ENDED = "lightning_memfit.end"
"""The audit event of an end of the program, whose argument is the function's name."""


class RefusedError(BaseException):
    """A step would have changed something outside of its copy.

    Not an `Exception`, so that no handler of the module's goes on with it.

    Args:
        what: What it would have done, to follow the word "it".
        place: The line, in words; empty if it is not known.
    """

    def __init__(self, what: str, place: str) -> None:
        super().__init__(
            f"it {what}{f' ({place})' if place else ''}, and a trial step changes nothing outside of its copy. Do that "
            "where no trial step goes, such as in `on_train_epoch_end` or in a hook of validation"
        )


class Seal:
    """What one trial step may do.

    Args:
        base: The frame that runs the step. What it was called from doesn't count.
        reading: Whether data are read, for which connections may be used, processes started and databases opened.

    Attributes:
        refused: What was refused, the first one first.
        is_muted: Whether what the user's code prints or logs goes nowhere.
    """

    def __init__(self, base: FrameType | None, reading: bool = False) -> None:
        self.refused: list[RefusedError] = []
        self.is_muted = True
        self._base = base
        self._reading = reading
        self._scratch: set[str] = set()
        self._queues: weakref.WeakSet[Any] = weakref.WeakSet()
        self._descriptors = _open_descriptors()
        self._given_at = ""
        self._ended: list[bool] = []  # shared with tasks, whose threads may outlive the step

    @property
    def is_over(self) -> bool:
        """Whether the step has ended."""
        return bool(self._ended)

    def for_task(self) -> "Seal":
        """The same seal for what another thread is given to do, on this line of the user's code."""
        task = copy.copy(self)  # which shares what is refused
        task._given_at = next((place_of(frame) for frame in self._frames() if owner_of_frame(frame) == "user"), "")
        return task

    def adopt(self, waiting: Any) -> None:
        """Let the step use a queue of its own."""
        self._queues.add(waiting)

    def owns_queue(self, waiting: Any) -> bool:
        """Whether the step has made a queue, or a queue was made for it."""
        return waiting in self._queues

    def owns_descriptor(self, number: Any) -> bool:
        """Whether a file or connection was opened in the step, which was refused if it does harm."""
        return number not in self._descriptors or self._descriptors[number] != _identity(number)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Look at an operation before it happens.

        Raises:
            RefusedError: If it would change something of the user's.
        """
        if self.is_over or (self._reading and event in _NEEDED_TO_READ):
            return
        if event in _ON_NUMBERS and isinstance(args[0], int) and self.owns_descriptor(args[0]):
            return
        if event.startswith("tempfile."):
            self._scratch.add(os.path.abspath(os.fsdecode(args[0])))
        elif event == "builtins.breakpoint":
            self.is_muted = False
        else:
            what = _WATCHED[event](*args, scratch=self._scratch)
            if what:
                self._refuse(what)

    def _frames(self) -> Iterator[FrameType]:
        """What runs, the innermost first, without this file."""
        for frame in running_frames():
            if frame is self._base:
                return
            if frame.f_code.co_filename != __file__:
                yield frame

    def _refuse(self, what: str) -> None:
        place = self._given_at
        for frame in self._frames():
            owner, name = owner_of_frame(frame), str(frame.f_globals.get("__name__"))
            if owner == "user":
                place = place_of(frame)
                break
            if _fills_a_cache(name) or name == "tempfile" or _is_ours(name):
                return
            if owner == "library" and not place:
                place = place_of(frame)
        error = RefusedError(what, place)
        self.refused.append(error)
        raise error

    def forget(self, error: BaseException) -> None:
        """Forget what was refused, as the batch that it was refused in doesn't count."""
        self.refused[:] = [one for one in self.refused if one is not error]

    def end(self) -> None:
        """Let its threads do what they like from now on, and remove temporary files that the step has left."""
        self._ended.append(True)
        self._base = None
        for path in self._scratch:
            with suppress(OSError):
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def _open_descriptors() -> dict[int, tuple[int, int]]:
    """Numbers of all files and connections that are open, and which these are."""
    names: Iterable[str] = map(str, range(1024))  # where the system doesn't tell
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            names = os.listdir(folder)
            break
    found = {int(name): _identity(int(name)) for name in names if name.isdecimal()}
    return {number: identity for number, identity in found.items() if identity is not None}


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _fills_a_cache(module: str) -> bool:
    return module.startswith(_FILL_CACHES)


_CARRIERS = ("lightning_memfit.profile", "lightning_memfit.memory", "lightning_memfit.techniques.core.first_batch")
"""Parts of this package that call the user's code, so that they don't answer for what happens in it."""

_ANSWERABLE = ("lightning_memfit.profile.cache", "lightning_memfit.profile.background")


def _is_ours(module: str) -> bool:
    return module.startswith(_ANSWERABLE) or (
        module.startswith("lightning_memfit.") and not module.startswith(_CARRIERS)
    )


# --- what operations do -----------------------------------------------------------------------------------------------

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _path(path: Any, folder: Any = -1) -> str:
    """An absolute path; the empty one for a descriptor."""
    if isinstance(path, int) or path is None:
        return ""
    found = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(found):
        with suppress(OSError):
            found = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), found)
    return os.path.abspath(found)


def _is_scratch(path: str, scratch: set[str]) -> bool:
    return any(path == one or path.startswith(one + os.sep) for one in scratch)


def _opens(path: Any, mode: Any, flags: Any, *, scratch: set[str]) -> str:
    if isinstance(path, int) or not (isinstance(flags, int) and flags & _WRITING):
        return ""
    found = _path(path)
    if found == os.devnull or os.path.isdir(found) or _is_scratch(found, scratch):
        return ""
    return f"writes to `{os.fsdecode(path)}`"


def _changes(verb: str, folder_at: int | None = None) -> Callable[..., str]:
    """Words for an operation on one path that must exist."""

    def describe(path: Any, *rest: Any, scratch: set[str]) -> str:
        folder = rest[folder_at - 1] if folder_at is not None and folder_at <= len(rest) else -1
        found = _path(path, folder)
        if found and (not os.path.lexists(found) or _is_scratch(found, scratch)):
            return ""
        return f"{verb} `{found or path}`"

    return describe


def _makes_folder(path: Any, mode: Any, folder: Any, *, scratch: set[str]) -> str:
    found = _path(path, folder)
    exists = os.path.lexists(found) or _is_scratch(found, scratch)
    return "" if exists else f"makes the folder `{os.fsdecode(path)}`"


def _renames(source: Any, target: Any, source_at: Any = -1, target_at: Any = -1, *, scratch: set[str]) -> str:
    paths = _path(source, source_at), _path(target, target_at)
    if not os.path.lexists(paths[0]) or all(_is_scratch(path, scratch) for path in paths):
        return ""
    return f"moves `{os.fsdecode(source)}` to `{os.fsdecode(target)}`"


def _links(source: Any, target: Any, *rest: Any, scratch: set[str]) -> str:
    return "" if _is_scratch(_path(target), scratch) else f"makes the link `{os.fsdecode(target)}`"


def _starts(at: int) -> Callable[..., str]:
    """Words for an operation that starts a program, given at a place of its arguments."""

    def describe(*args: Any, scratch: set[str]) -> str:
        given = args[at] if at < len(args) else ""
        words = [os.fsdecode(one) for one in (given if isinstance(given, (list, tuple)) else [given]) if one]
        shown = f" (`{' '.join(words)}`)" if words else ""
        return f"starts a process{shown}"

    return describe


def _sends_signal(process: Any, number: Any, *, scratch: set[str]) -> str:
    return f"sends signal {int(number)} to {process}" if number else ""


def _connects(verb: str) -> Callable[..., str]:
    def describe(socket: Any, address: Any = None, *rest: Any, scratch: set[str]) -> str:
        return f"{verb} {address}"

    return describe


def _opens_database(path: Any, *rest: Any, scratch: set[str]) -> str:
    shown = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
    is_own = shown in ("", ":memory:") or _is_scratch(_path(shown), scratch)
    return "" if is_own else f"opens the database `{shown}`"


def _shown_descriptor(number: int) -> str:
    """What a descriptor is open for; empty if that can't be told."""
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return ""


def _uses_descriptor(verb: str, number: int, *, scratch: set[str]) -> str:
    shown = _shown_descriptor(number)
    return "" if shown == os.devnull or _is_scratch(shown, scratch) else f"{verb} `{shown or number}`"


_MAPS_UNWRITTEN = (mmap.ACCESS_READ, mmap.ACCESS_COPY)


def _maps(number: int, length: int, access: int, *rest: Any, scratch: set[str]) -> str:
    if number < 0 or access in _MAPS_UNWRITTEN or not _is_writable(number):
        return ""
    return _uses_descriptor("maps memory to", number, scratch=scratch)


def _is_writable(number: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        return fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False


_WATCHED: dict[str, Callable[..., str]] = {
    "open": _opens,
    _OPENED: lambda path, *, scratch: _opens(path, None, os.O_WRONLY, scratch=scratch),
    "os.remove": _changes("removes", 1),
    "os.rmdir": _changes("removes", 1),
    "os.truncate": _changes("shortens"),
    "os.utime": _changes("changes the times of", 3),
    "os.chmod": _changes("changes the mode of", 2),
    "os.chown": _changes("changes the owner of", 3),
    "os.chflags": _changes("changes the flags of"),
    "os.setxattr": _changes("changes attributes of"),
    "os.removexattr": _changes("changes attributes of"),
    "os.mkdir": _makes_folder,
    "os.rename": _renames,
    "os.link": _links,
    "os.symlink": _links,
    "subprocess.Popen": _starts(1),
    "os.system": _starts(0),
    "os.exec": _starts(1),
    "os.posix_spawn": _starts(1),
    "os.spawn": _starts(2),
    "os.fork": _starts(9),
    "os.forkpty": _starts(9),
    "pty.spawn": _starts(0),
    _STARTED: _starts(9),
    _HANDED: lambda *_, scratch: "gives work to a thread that was there before",
    _SENT: lambda *_, scratch: "sends data through a connection",
    _USED: _uses_descriptor,
    _SHARED: lambda name, *, scratch: f"makes or removes shared memory{f' (`{name}`)' if name else ''}",
    _QUEUED: lambda *_, scratch: "changes a queue that was there before",
    _ENDED: lambda name, *, scratch: f"ends the program by `os.{name}`",
    "mmap.__new__": _maps,
    "os.kill": _sends_signal,
    "os.killpg": _sends_signal,
    "signal.pthread_kill": _sends_signal,
    "socket.connect": _connects("connects to"),
    "socket.bind": _connects("listens at"),
    "socket.sendto": _connects("sends data to"),
    "socket.sendmsg": _connects("sends data to"),
    "webbrowser.open": lambda address, *, scratch: f"opens {address}",
    "syslog.syslog": lambda *_, scratch: "writes to the system's log",
    "sqlite3.connect": _opens_database,
}
"""Words for what an audited operation does; empty ones if it changes nothing."""

_ON_NUMBERS = frozenset(("mmap.__new__", "os.truncate", "os.utime", "os.chmod", "os.chown", "os.setxattr"))
"""Operations that may be given the number of an open file."""

_NEEDED_TO_READ = frozenset(
    (
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.system",
        "socket.bind",
        "socket.connect",
        "socket.sendmsg",
        "socket.sendto",
        "sqlite3.connect",
        "subprocess.Popen",
        _HANDED,
        _QUEUED,
        _SENT,
        _SHARED,
        _STARTED,
        _USED,
    )
)
"""Operations by which data may be read."""

_LOOKED_AT = frozenset((*_WATCHED, "tempfile.mkstemp", "tempfile.mkdtemp", "builtins.breakpoint"))


# --- the hook and its threads -----------------------------------------------------------------------------------------

_seals: dict[int, list[Seal]] = {}
"""The seals of every sealed thread by its number, the innermost last."""

_is_hooked = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _seals and event in _LOOKED_AT:
        seals = _seals.get(get_ident())
        if seals:
            seals[-1].audit(event, args)


def current_seal() -> Seal | None:
    """The innermost seal of this thread, unless its step has ended."""
    seals = _seals.get(get_ident())
    return seals[-1] if seals and not seals[-1].is_over else None


def is_sealed_thread(number: int) -> bool:
    """Whether a thread is part of a sealed step."""
    return number in _seals


def _forget_other_threads() -> None:
    """In a forked process, forget threads that it doesn't have: one of its own may get the number of one of them."""
    own = _seals.get(get_ident())
    _seals.clear()
    if own:
        _seals[get_ident()] = own


@contextmanager
def _entered(seal: Seal) -> Iterator[None]:
    """Seal this thread."""
    global _is_hooked
    if not _is_hooked:  # a hook can't be taken off again, so that there is one for good
        sys.addaudithook(_audit)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=_forget_other_threads)
        _is_hooked = True
    thread = get_ident()
    seals = _seals.setdefault(thread, [])
    seals.append(seal)
    try:
        yield
    finally:
        seals.remove(seal)
        if not seals:
            del _seals[thread]


@contextmanager
def sealed(reading: bool = False) -> Iterator[Seal]:
    """Refuse what this thread, and those that it starts, would change outside, and mute the user's code.

    Args:
        reading: Whether data are read, and no step is run; see `Seal`.

    Raises:
        RefusedError: If something was refused, whatever became of the error.
    """
    seal = Seal(sys._getframe(2), reading)  # past this one and that of `contextlib`
    try:
        with ExitStack() as stack:
            stack.callback(seal.end)
            for enter in (
                _asked_writers,
                _sealed_threads,
                _asked_threads,
                _sealed_descriptors,
                _muted_streams,
                _muted_loggers,
                _no_exit_functions,
            ):
                stack.enter_context(enter())
            stack.enter_context(_entered(seal))
            yield seal
    except Exception as error:
        if seal.refused:
            raise seal.refused[0] from error
        raise
    if seal.refused:
        raise seal.refused[0]


@contextmanager
def _asked_writers() -> Iterator[None]:
    """Let native functions that open files report it first, those of modules that a step imports among them."""
    with ExitStack() as stack:
        for module in {module for module, _ in _NATIVE_WRITERS} & sys.modules.keys():
            _ask(sys.modules[module], stack)
        processes = import_module("multiprocessing.process")
        stack.enter_context(replaced(processes.BaseProcess, "start", _reporting_start(processes.BaseProcess.start)))
        finder: Any = _AskingFinder(stack)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _ask(module: ModuleType, stack: ExitStack) -> None:
    """Let the native writers of a module report what they open, until the stack is closed."""
    for name in (name for where, name in _NATIVE_WRITERS if where == module.__name__):
        owner: Any = module
        *parents, last = name.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        if owner is not None and last in vars(owner):
            stack.enter_context(replaced(owner, last, _asking(vars(owner)[last])))


class _AskingFinder:
    """Finds modules with native writers as Python does, and patches them when they have been imported."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if all(name != module for module, _ in _NATIVE_WRITERS):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_ask(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    _ask(module, self._stack)

            spec.loader.exec_module = execute_and_ask  # type: ignore[method-assign]
        return spec


def _asking(writer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(writer, updated=())
    def write(*args: Any, **kwargs: Any) -> Any:
        paths = [one for one in (*args, *kwargs.values()) if isinstance(one, (str, os.PathLike))]
        if paths:
            sys.audit(_OPENED, paths[0])
        return writer(*args, **kwargs)

    return write


def _reporting_start(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def report(process: Any) -> Any:
        sys.audit(_STARTED)
        return start(process)

    return report


@contextmanager
def _sealed_threads() -> Iterator[None]:
    """Seal threads that a sealed thread starts, and tasks that it gives to other threads."""
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def start_sealed(thread: threading.Thread) -> None:
        seal = current_seal()
        if seal is not None:
            thread.run = _without_error(_under(seal.for_task(), thread.run))  # type: ignore[method-assign]
        start(thread)

    def submit_sealed(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        seal = current_seal()
        return submit(pool, function if seal is None else _under(seal.for_task(), function), *args, **kwargs)

    with replaced(threading.Thread, "start", start_sealed), replaced(ThreadPoolExecutor, "submit", submit_sealed):
        yield


@contextmanager
def _asked_threads() -> Iterator[None]:
    """Let queues and event loops of other threads, and open sockets, report what they are given."""
    make, put, get = queue.Queue.__init__, queue.Queue.put, queue.Queue.get
    loops = sys.modules.get("asyncio.base_events")

    def make_own(waiting: Any, *args: Any, **kwargs: Any) -> None:
        make(waiting, *args, **kwargs)
        seal = current_seal()
        if seal is not None:
            seal.adopt(waiting)

    def put_unless_refused(waiting: Any, *args: Any, **kwargs: Any) -> None:
        seal = current_seal()
        if seal is not None and not _is_called_by("logging.handlers"):  # records of libraries are nobody's doing
            if _is_awaited(waiting):
                sys.audit(_HANDED)
            if not seal.owns_queue(waiting):
                sys.audit(_QUEUED)
        put(waiting, *args, **kwargs)

    def get_unless_refused(waiting: Any, *args: Any, **kwargs: Any) -> Any:
        seal = current_seal()
        if seal is not None and not seal.owns_queue(waiting):
            sys.audit(_QUEUED)
        return get(waiting, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(queue.Queue, "__init__", make_own))
        stack.enter_context(replaced(queue.Queue, "put", put_unless_refused))
        stack.enter_context(replaced(queue.Queue, "get", get_unless_refused))
        if loops is not None:
            kind = loops.BaseEventLoop
            stack.enter_context(replaced(kind, "call_soon_threadsafe", _asking_loop(kind.call_soon_threadsafe)))
        for name in ("send", "sendall"):
            is_own = name in vars(socket.socket)  # of a seal around this one; Python's is inherited
            stack.callback(setattr if is_own else _delete, socket.socket, name, getattr(socket.socket, name))
            setattr(socket.socket, name, _reporting_send(getattr(socket.socket, name)))
        yield


_ON_DESCRIPTORS = {
    "write": (0, "writes to"),
    "writev": (0, "writes to"),
    "pwrite": (0, "writes to"),
    "pwritev": (0, "writes to"),
    "sendfile": (0, "writes to"),
    "copy_file_range": (1, "writes to"),
    "splice": (1, "writes to"),
    "posix_fallocate": (0, "makes room in"),
    "close": (0, "closes"),
    "closerange": (0, "closes"),
    "dup2": (1, "replaces"),
    "lseek": (0, "moves"),
    "read": (0, "reads on in"),
    "readv": (0, "reads on in"),
}
"""Functions of `os`, which of their arguments is the descriptor that changes, and what becomes of it."""

_MADE_BY_PATH = ("mkfifo", "mknod")
_ENDS = ("_exit", "abort")


@contextmanager
def _sealed_descriptors() -> Iterator[None]:
    """Let functions of `os` on what was open before report it, those of shared memory and pipes, and those that end.

    A descriptor's number may have been given to a file that the step has opened: only those open before count.
    """
    with ExitStack() as stack:
        for name, (place, verb) in _ON_DESCRIPTORS.items():
            if hasattr(os, name):
                stack.enter_context(replaced(os, name, _reporting_use(getattr(os, name), place, verb)))
        for name in _MADE_BY_PATH:
            if hasattr(os, name):
                stack.enter_context(replaced(os, name, _asking(getattr(os, name))))
        for name in _ENDS:
            stack.enter_context(replaced(os, name, _reporting_end(getattr(os, name))))
        shared: Any = sys.modules.get("multiprocessing.shared_memory")
        if shared is not None:
            kind = shared.SharedMemory
            stack.enter_context(replaced(kind, "__init__", _reporting_memory(kind.__init__)))
            stack.enter_context(replaced(kind, "unlink", _reporting_memory(kind.unlink)))
        pipes: Any = sys.modules.get("multiprocessing.connection")
        for name in ("_send_bytes", "_recv_bytes"):
            if pipes is not None:
                stack.enter_context(replaced(pipes.Connection, name, _reporting_pipe(vars(pipes.Connection)[name])))
        yield


def _reporting_end(function: Callable[..., Any]) -> Callable[..., Any]:
    process = os.getpid()

    @functools.wraps(function, updated=())
    def end(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() == process:  # a forked child has to end so, and would go on as a second copy of the program
            sys.audit(_ENDED, function.__name__)
        return function(*args, **kwargs)

    return end


def _reporting_use(function: Callable[..., Any], place: int, verb: str) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def use(*args: Any, **kwargs: Any) -> Any:
        seal = current_seal()
        number = args[place] if len(args) > place else next(iter(kwargs.values()), None)
        if seal is not None and isinstance(number, int) and not seal.owns_descriptor(number):
            if _is_called_by("multiprocessing.resource_tracker"):
                return function(*args, **kwargs)
            if seal.is_muted and verb == "writes to" and number in (1, 2):
                return _length(args[1:])
            sys.audit(_USED, verb, number)
        return function(*args, **kwargs)

    return use


def _is_called_by(module: str) -> bool:
    """Whether one of the next frames below the function that asks, past its own module, runs a module's code."""
    return any(frame.f_globals.get("__name__") == module for frame in islice(running_frames(), 2, 5))


def _length(written: Any) -> int:
    """Bytes of what a function of `os` was given to write."""
    data = written[0] if written else b""
    return sum(map(len, data)) if isinstance(data, (list, tuple)) else len(data) if hasattr(data, "__len__") else 0


def _reporting_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def report(memory: Any, *args: Any, **kwargs: Any) -> Any:
        is_made = function.__name__ == "unlink" or kwargs.get("create", args[1] if len(args) > 1 else False)
        if current_seal() is not None and is_made:
            sys.audit(_SHARED, kwargs.get("name", args[0] if args else getattr(memory, "name", None)))
        return function(memory, *args, **kwargs)

    return report


def _reporting_pipe(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def report(connection: Any, *args: Any) -> Any:
        seal = current_seal()
        if seal is not None and not seal.owns_descriptor(connection.fileno()):
            sys.audit(_SENT)
        return function(connection, *args)

    return report


def _delete(owner: Any, name: str, _: Any) -> None:
    delattr(owner, name)


def _asking_loop(soon: Callable[..., Any]) -> Callable[..., Any]:
    def soon_unless_refused(loop: Any, *args: Any, **kwargs: Any) -> Any:
        if current_seal() is not None and getattr(loop, "_thread_id", None) not in _seals:
            sys.audit(_HANDED)
        return soon(loop, *args, **kwargs)

    return soon_unless_refused


def _is_awaited(waiting: Any) -> bool:
    """Whether a thread that is not sealed waits for what is put into a queue."""
    idle = len(waiting.not_empty._waiters)
    sealed_threads = sum(any(not seal.is_over for seal in seals) for seals in list(_seals.values()))
    return bool(idle) and idle > sealed_threads - 1


def _reporting_send(send: Callable[..., Any]) -> Callable[..., Any]:
    def report(connection: Any, *args: Any) -> Any:
        sys.audit(_SENT)
        return send(connection, *args)

    return report


def _under(seal: Seal, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _entered(seal):
            return function(*args, **kwargs)

    return call


def _without_error(run: Callable[[], Any]) -> Callable[[], Any]:
    """End a thread quietly where something was refused: the seal remembers it."""

    def call() -> Any:
        with suppress(RefusedError):
            return run()

    return call


# --- what is muted ----------------------------------------------------------------------------------------------------


def _is_muted() -> bool:
    seal = current_seal()
    return seal is not None and seal.is_muted and not seal.is_over


class _Muted:
    """A standard stream that keeps nothing of what a sealed thread writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: Any) -> int:
        written: int = len(text) if _is_muted() else self._stream.write(text)
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> "_Muted":
        return _Muted(self._stream.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _muted_streams() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None:
                stack.enter_context(replaced(sys, name, _Muted(stream)))
        yield


@contextmanager
def _muted_loggers() -> Iterator[None]:
    """Drop what the user's code logs: records of libraries are nobody's doing."""
    handle = logging.Logger.handle

    def handle_unless_muted(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not (_is_muted() and owner_of(record.pathname, record.module == "__main__") == "user"):
            handle(logger, record)

    with replaced(logging.Logger, "handle", handle_unless_muted):
        yield


@contextmanager
def _no_exit_functions() -> Iterator[None]:
    """Let nothing that the user's code registers run at the end of the process."""
    register = atexit.register

    def register_unless_sealed(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        is_users = current_seal() is not None and owner_of_frame(sys._getframe(1)) == "user"
        return function if is_users else register(function, *args, **kwargs)

    with replaced(atexit, "register", register_unless_sealed):
        yield
