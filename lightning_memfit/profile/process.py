"""Run functions in copies of this process that are thrown away: `run` in one, `Worker` one after the other in another.

What a function changes in memory goes with its process. One audit hook refuses what it would do outside of it, by path:
to write anywhere but in its own temporary folder and in caches, to start programs, to connect. Where the kernel has
Landlock, native code is held to the same folders. Memory that is shared with other processes (`share_memory_()`,
`/dev/shm`) and devices are not isolated.

A copy is a fork. For traces none can be had of a process that has run a backward pass on a build for an accelerator, as
torch refuses backward passes there (`_is_usable`); of one that uses CUDA, none is made until a device has shown that it
holds (`benchmarks.gpu.fork`). `Elsewhere` spawns a new process then, which gets functions as pickles. Reading data
takes no backward pass, and forks beside CUDA as the workers of a DataLoader do. Where the system has no forks
(Windows, macOS), processes that end after their traces run functions themselves, on copies of what these hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import pickle
import re
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from typing_extensions import override

from lightning_memfit.memory.cache_files import default_cache_folder
from lightning_memfit.profile.culprit import calling_line, owner_of

T = TypeVar("T")

FORKS_BESIDE_CUDA = False
"""Whether a process that uses CUDA is forked for traces: not until `make gpu` has passed the step that tries it.

A fork can read neither the device's memory nor pinned memory, whose pages it doesn't inherit. Whoever sets this must
bring the tensors of modules and batches to plain host memory before the fork, and keep what lies on the device alive.
"""

_TRIES, _READY_S, _STACK_S = 5, 3.0, 0.3
"""A fork that doesn't come up in this time is made anew: another thread may have held a lock, which nobody frees."""


class LostError(RuntimeError):
    """A process gave no answer: it was ended, or ended itself. The message says how, and where it was."""


class NoProcessError(RuntimeError):
    """No process can be had that runs a function."""


class RefusedError(BaseException):
    """Code would have done something outside of its process; no `except Exception` goes on after it."""


def run(function: Callable[[], T], seconds: float | None = None, backward: bool = True, with_values: bool = False) -> T:
    """Run a function in a process that is thrown away, and return its result, which travels as a pickle."""
    if _ends_after_traces and not _has_forks():
        return _run_here(function, with_values)
    started, answer, is_over = time.monotonic(), b"", False
    folders = tempfile.TemporaryDirectory(prefix="memfit-", ignore_cleanup_errors=True)
    with folders as folder, tempfile.TemporaryFile() as stack:  # the child's stack, if it has to be ended
        pid, reading = _fork(partial(_be_thrown_away, function, folder, stack), stack.fileno(), backward)
        try:
            while not (is_over or reading.poll(0.5)):
                is_over = seconds is not None and time.monotonic() - started > seconds
            if is_over:
                _end(pid, signal.SIGUSR2)
                time.sleep(_STACK_S)
            else:
                with contextlib.suppress(EOFError):
                    answer = reading.recv_bytes()
        finally:
            reading.close()
            code = _end_and_wait(pid)
        stack.seek(0)
        place = _hung_at(stack.read().decode(errors="replace"))
    if answer:
        found: T = _taken(answer)
        return found
    if is_over:
        raise LostError(f"it was ended after {seconds:g} s{place}")
    raise LostError(f"it ended its process ({f'signal {-code}' if code < 0 else f'exit code {code}'})")


def _be_thrown_away(function: Callable[[], Any], folder: str, stack: Any, writing: Connection) -> None:
    global _is_thrown_away
    _is_thrown_away = True
    tempfile.tempdir = os.environ["TMPDIR"] = folder  # the folders of its own processes included
    # It writes the stack down in C, wherever the process hangs. `dump_traceback_later` would wait for ever in a fork of
    # a process that uses it, as pytest does.
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # which is made when it is first asked for
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    keep_inside(folder)
    writing.send_bytes(_answer(function))


def end_after_traces() -> None:
    """Say that this process ends when its traces are made, so that they may run in it where there are no forks."""
    global _ends_after_traces
    _ends_after_traces = True


def bring_home(collect: Callable[[], Any], take: Callable[[Any], object]) -> None:
    """Let every process bring more than its result to the one that made it."""
    _BROUGHT.append((collect, take))


def _imported() -> list[str]:
    """Modules of libraries that this copy of a command has imported, in their order."""
    if not _ends_after_traces:
        return []
    new = [(name, getattr(module, "__file__", None)) for name, module in sys.modules.items() if name not in _modules]
    return [name for name, file in new if file and owner_of(file) != "user"]


def import_too(names: list[str]) -> None:
    """Import what copies of this process need, so that none of them has to; what can't be imported fails there."""
    for name in names:
        with contextlib.suppress(Exception):
            import_module(name)


_modules: frozenset[str] = frozenset()
"""What was imported when this copy of a command was made."""

_BROUGHT: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [(_imported, import_too)]


def can_fork(backward: bool = True) -> bool:
    """Whether this process may be forked, as far as that can be told before."""
    on_cuda = backward and torch.cuda.is_initialized() and not FORKS_BESIDE_CUDA
    return _has_forks() and not on_cuda


def _has_forks() -> bool:
    return sys.platform == "linux" and hasattr(os, "fork")


is_closed: ContextVar[bool] = ContextVar("is_closed", default=False)
"""Whether no process may be made: by a callback that traces in `setup`, and is part of what is traced."""

_is_thrown_away = False
"""Whether this process is one that `run` has made."""

_ends_after_traces = False

_is_parent = False
"""Whether it is this module that makes and ends processes, which nobody else may where that is refused."""


@contextlib.contextmanager
def _as_parent() -> Iterator[None]:
    global _is_parent
    _is_parent = True
    try:
        yield
    finally:
        _is_parent = False


# --- one function -----------------------------------------------------------------------------------------------------


def _end(pid: int, number: int = 9) -> None:
    """Send a signal, SIGKILL by default, to a process of this module's."""
    with _as_parent(), contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _end_and_wait(pid: int) -> int:
    _end(pid)
    with contextlib.suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 0


def _fork(be_child: Callable[[Connection], None], kept: int, backward: bool) -> tuple[int, Connection]:
    """Fork until a child says that it is ready; return its number, and where to read what it writes.

    The child calls `be_child` with where to write to. Both have the descriptor `kept`.
    """
    if is_closed.get():
        _refuse("start a process")
    if not can_fork(backward):
        on_cuda = " for a trace, as it uses CUDA" if can_fork(backward=False) else ""
        raise NoProcessError(f"this process can't be forked{on_cuda}")
    sys.stdout.flush()
    sys.stderr.flush()
    for _ in range(_TRIES):
        reading, writing = multiprocessing.get_context("spawn").Pipe(duplex=False)
        with warnings.catch_warnings(), _as_parent():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks where there are threads
            pid = os.fork()
        if pid == 0:
            try:
                _become_copy({writing.fileno(), kept}, backward)
                writing.send_bytes(b"r" if _is_usable(backward) else b"a")
                be_child(writing)
            finally:
                os._exit(0)  # no `atexit`, no destructor, and no thread of others
        writing.close()
        said = b""
        with contextlib.suppress(EOFError):
            said = reading.recv_bytes() if reading.poll(_READY_S) else b""
        if said == b"r":
            return pid, reading
        reading.close()
        _end_and_wait(pid)
        if said == b"a":
            raise NoProcessError("torch runs no backward pass in forks of a process that has run one on an accelerator")
    raise NoProcessError(f"{_TRIES} forks of this process didn't come up: another thread holds a lock that they need")


def _answer(function: Callable[[], Any]) -> bytes:
    """Run a function, and write its outcome down for the other process."""
    value, told = None, None
    try:
        found = function()
        try:
            value = pickle.dumps(found)
        except Exception as error:  # objects raise what they like when they are asked for their state
            raise LostError(f"what it returned can't be sent to another process: {error}") from error
    except BaseException as error:
        is_program = isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit))
        lost = LostError(f"{'it ended the program (' * is_program}{type(error).__name__}: {error}{')' * is_program}")
        told = pickle.dumps((lost, None))
        for cause in () if is_program else (None, _without_traceback(error.__cause__)):
            with contextlib.suppress(Exception):  # they may hold what can't be pickled
                buffer = io.BytesIO()
                _ErrorPickler(buffer).dump((error, cause))
                pickle.loads(buffer.getvalue())  # nosec B301
                told = buffer.getvalue()
    return pickle.dumps((value, told, [collect() for collect, _ in _BROUGHT]))


class _ErrorPickler(pickle.Pickler):
    """Writes errors without calling their constructors, which may take other arguments than they hold."""

    @override
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            return _remade_error, (type(value), value.args, vars(value))
        return NotImplemented


def _remade_error(kind: type[BaseException], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *arguments)
    vars(error).update(attributes)
    return error


def _taken(answer: bytes) -> Any:
    pickled, told, brought = pickle.loads(answer)  # nosec B301  # from a copy of this process
    for (_, take), found in zip(_BROUGHT, brought, strict=False):
        take(found)
    if told is not None:
        error, cause = pickle.loads(told)  # nosec B301
        raise error from cause
    return pickle.loads(pickled)  # nosec B301


def _without_traceback(error: BaseException | None) -> BaseException | None:
    """An error that can be sent, with the file of its `raise` statement as `raised_in`."""
    if error is not None and error.__traceback__ is not None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if (last.line or "").startswith("raise"):
            error.raised_in = last.filename  # type: ignore[attr-defined]
    return error


def _hung_at(stack: str) -> str:
    """The innermost line of the user's in a stack that `faulthandler` wrote, else the innermost one; in words."""
    lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', stack, re.MULTILINE)
    users = [line for line in lines if owner_of(line[0]) == "user"]
    return "".join(f" at {name}:{line}, in `{function}`" for name, line, function in (users or lines)[:1])


# --- a copy of this process -------------------------------------------------------------------------------------------


def _become_copy(kept: set[int], backward: bool) -> None:
    """Leave everything alone that a fork shares with its parent, and end with it.

    What only reads data keeps the process groups, of which samplers ask their rank.
    """
    global _modules
    if _ends_after_traces:
        _modules = frozenset(sys.modules)
    gc.disable()  # a collection writes to the header of every object, and so copies the parent's memory
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _cut_off(kept)
    if backward:
        _leave_groups()
    torch.set_num_threads(1)  # threads of parallel operators are not in a fork, which would wait for them for ever
    torch.autograd.set_multithreading_enabled(False)


def _cut_off(kept: set[int]) -> None:
    """Let what is open for writing lead nowhere, connections included, and read other files at places of our own.

    A fork shares them: what it flushes would be written into the parent's log, and what it reads be skipped there.
    """
    import fcntl  # which Windows lacks

    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number in kept or number == nowhere:
            continue
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(("/dev/", "anon_inode", "/proc")) and number > 2:
                continue  # devices such as a GPU
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE or not os.path.isfile(target):
                os.dup2(nowhere, number, inheritable=False)
            else:
                again = os.open(f"/proc/self/fd/{number}", os.O_RDONLY)
                os.lseek(again, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(again, number, inheritable=False)
                os.close(again)
    os.close(nowhere)


def _leave_groups() -> None:
    """Forget process groups, whose threads and connections are the parent's. To destroy one would wait for these."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and c10d.is_initialized():
        _left.append((c10d._world, c10d.GroupMember.WORLD))
        c10d._world = c10d._World()
        c10d.GroupMember.WORLD = None


_left: list[Any] = []
"""What must not be freed in a copy."""


def _is_usable(backward: bool) -> bool:
    """Whether a backward pass runs here, if one may. Doesn't return if a lock that a step needs was held at the fork.

    A build of torch for an accelerator starts threads for devices at the first backward pass, with or without a device,
    and refuses every other one in processes that are forked from then on. Only these know.
    """
    torch.get_rng_state()
    logging.getLogger(__name__).debug("")
    if not backward:
        return True
    with torch.inference_mode(False), torch.enable_grad():
        try:
            torch.ones((), requires_grad=True).backward()
        except RuntimeError:
            return False
    return True


# --- what must not leave a process ------------------------------------------------------------------------------------

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_PATHS: dict[str, tuple[tuple[int, int | None], ...]] = {
    **dict.fromkeys(("os.remove", "os.rmdir"), ((0, 1),)),
    **dict.fromkeys(("os.mkdir", "os.chmod"), ((0, 2),)),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    **dict.fromkeys(("os.truncate", "os.setxattr", "os.removexattr", "sqlite3.connect"), ((0, None),)),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
}
"""Events that change what lies at a path: where their arguments have it, and the folder that it may be relative to."""

_PROGRAMS = (
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"),
    "os.startfile",
)

_CONNECTIONS = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")

_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR")
"""Variables that name folders of what programs fill again by themselves."""


def keep_inside(folder: str) -> None:
    """Refuse from now on what this process would do outside of itself. There is no way to end this."""
    named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    with contextlib.suppress(OSError):
        default_cache_folder().mkdir(parents=True, exist_ok=True)  # only folders that exist can be let through
    allowed = [folder, str(default_cache_folder()), os.path.expanduser("~/.cache"), *named]
    real = tuple(os.path.join(os.path.realpath(one), "") for one in allowed)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and isinstance(path, (str, bytes)):
                _check(path, None, real, event)
        elif event in _PATHS:
            for place, of_folder in _PATHS[event]:
                _check(arguments[place], None if of_folder is None else arguments[of_folder], real, event)
        elif event in _PROGRAMS and not _is_parent:
            _refuse("start a process")
        elif event in _CONNECTIONS:
            _refuse(f"connect to {arguments[1]!r}")
        elif event in ("os.kill", "os.killpg") and arguments[0] != os.getpid() and not _is_parent:
            _refuse("send a signal")

    save = torch.save

    def checked_save(value: Any, file: Any, *arguments: Any, **keywords: Any) -> None:
        if isinstance(file, (str, os.PathLike)):  # which native code opens
            _check(os.fspath(file), None, real, "open")
        save(value, file, *arguments, **keywords)

    torch.save = checked_save  # type: ignore[assignment]
    _restrict_writes(real)
    sys.addaudithook(refuse)


def _check(path: Any, folder: Any, allowed: tuple[str, ...], event: str) -> None:
    if isinstance(path, int) or path in (":memory:", os.devnull):  # open files are dealt with already
        return
    name = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
    if os.path.join(real, "").startswith(allowed) or f"{os.sep}__pycache__" in real:
        return
    if os.path.lexists(real) if event == "os.mkdir" else event == "os.remove" and not os.path.lexists(real):
        return  # which ends in an error by itself
    _refuse(f"write to {name!r}")


def _refuse(doing: str) -> NoReturn:
    raise RefusedError(f"it would {doing}{calling_line()}")


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
"""Numbers of the system calls, the same on all processors (Linux, Documentation/userspace-api/landlock.rst)."""

_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14


def _restrict_writes(folders: tuple[str, ...]) -> None:
    """Let the kernel refuse writes to other folders and new programs, also to native code; where it can't, nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 3:  # it knows nothing of truncation, by which files are lost
        return
    rights = 1 | _WRITE_FILE | sum(1 << bit for bit in range(4, 15))  # execute; write, remove, make, move, truncate
    rules = libc.syscall(_LANDLOCK_CREATE, struct.pack("=Q", rights), 8, 0)
    if rules < 0:
        return
    for name in (*folders, os.devnull):
        with contextlib.suppress(OSError):
            path = os.open(name, os.O_PATH | os.O_CLOEXEC)
            given = rights & ~1 if os.path.isdir(name) else _WRITE_FILE | _TRUNCATE
            libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", given, path), 0)
            os.close(path)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which the next call asks for
    libc.syscall(_LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


# --- many functions ---------------------------------------------------------------------------------------------------


class Worker:
    """A copy of this process as it is now, which runs functions later, each in a copy of its own.

    It should be made before this process runs a backward pass, and by those who want to trace something that will have
    changed by then. Functions travel as pickles, such as a `functools.partial` of what a module of Python holds. Where
    this process can't be forked, another is spawned, which gets what is shared as a pickle, tensors by their shapes.
    """

    def __init__(self, *shared: object, with_values: bool = False) -> None:
        self._shared, self._pid = shared, 0
        self._connection, theirs = multiprocessing.get_context("spawn").Pipe()
        try:
            try:
                self._pid, self._reading = _fork(partial(self._serve_fork, theirs), theirs.fileno(), backward=True)
            except NoProcessError as error:
                self._process = _spawn(theirs, shared, with_values, str(error))
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()

    def run(self, function: Callable[[], T]) -> T:
        """Run a function and return its result."""
        buffer = io.BytesIO()
        try:
            _SharingPickler(buffer, self._shared).dump(function)
        except Exception as error:  # objects raise what they like when they are asked for their state
            raise NoProcessError(f"it can't be sent to another process: {error}") from error
        try:
            self._connection.send_bytes(buffer.getvalue())
            answer = self._connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise LostError("the process that traces has ended") from error
        found: T = _taken(answer)
        return found

    def close(self) -> None:
        """End the worker, which a spawned one does by itself when nobody writes to it any more."""
        self._connection.close()
        if self._pid:
            pid, self._pid = self._pid, 0
            self._reading.close()
            _end_and_wait(pid)

    def __del__(self) -> None:
        if hasattr(self, "_connection") and not _is_thrown_away:
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Worker:
        return self

    def _serve_fork(self, connection: Connection, _: Connection) -> None:
        self._pid = 0
        _serve(connection, self._shared)


def _serve(connection: Connection, shared: tuple[object, ...]) -> None:
    """Run what comes until the other process ends."""
    with contextlib.suppress(EOFError):
        while True:
            task = connection.recv_bytes()
            connection.send_bytes(_answer(lambda: _SharingUnpickler(io.BytesIO(task), shared).load()()))  # noqa: B023


# --- where this process can't be forked -------------------------------------------------------------------------------


class Elsewhere:
    """Runs tasks that make processes of their own: here, or where this process can't be forked in a new one.

    A task within a task is left to the outer one, so that one new process serves all of them.
    """

    def __init__(self, *shared: object, with_values: bool = False) -> None:
        self._shared, self._with_values = shared, with_values
        self._worker: Worker | None = None
        self.is_inner = _is_in_task.get()

    def run(self, task: Callable[[], T]) -> T:
        """Run a task, such as a `functools.partial` of what a module of Python holds, and return its result."""
        if self._worker is None:
            before = _is_in_task.set(True)
            try:
                return task()
            except NoProcessError:
                if self.is_inner:
                    raise
            finally:
                _is_in_task.reset(before)
            self._worker = Worker(*self._shared, with_values=self._with_values)
        return self._worker.run(task)

    def close(self) -> None:
        """End the new process, if there is one."""
        if self._worker is not None:
            self._worker.close()


_is_in_task: ContextVar[bool] = ContextVar("_is_in_task", default=False)


def _spawn(theirs: Connection, shared: tuple[object, ...], with_values: bool, reason: str) -> Any:
    """Start a new process that serves."""
    main: Any = sys.modules["__main__"]
    if hasattr(main, "__memfit_spawned__"):
        raise NoProcessError(reason)
    file = getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None
    with contextlib.suppress(OSError):
        if file is not None and "__main__" not in Path(file).read_text(encoding="utf-8"):
            raise NoProcessError(f"{reason}, and a new one would run {file} again{_ADVICE}")
    buffer = io.BytesIO()
    try:
        _ShapePickler(buffer, with_values).dump(shared)
    except Exception as error:  # objects raise what they like when they are asked for their state
        raise NoProcessError(f"{reason}, and it can't be sent to a new one: {error}") from error
    process = multiprocessing.get_context("spawn").Process(
        target=_serve_spawned, args=(theirs, buffer.getvalue(), reason), daemon=True
    )
    process.start()
    return process


def _serve_spawned(connection: Connection, pickled: bytes, reason: str) -> None:
    sys.modules["__main__"].__memfit_spawned__ = True  # type: ignore[attr-defined]
    end_after_traces()
    try:
        shared = pickle.loads(pickled)  # nosec B301  # from the process that spawned this one
    except Exception as error:
        refusal = NoProcessError(f"{reason}, and a new one can't read what it got: {error}{_ADVICE}")
        connection.recv_bytes()
        connection.send_bytes(_answer(partial(_raise, refusal)))
    else:
        _serve(connection, shared)


_ADVICE = ". Start a script's run under `if __name__ == '__main__':`, and import its classes from another file"


def _raise(error: Exception) -> NoReturn:
    raise error


class _ShapePickler(pickle.Pickler):
    """Writes tensors without their values, but for single numbers and integers or if asked, and Trainers as None."""

    def __init__(self, file: io.BytesIO, with_values: bool) -> None:
        super().__init__(file)
        self._with_values = with_values
        self._copies: dict[int, torch.Tensor] = {}
        """What is written as torch does it, by `id`."""

    @override
    def reducer_override(self, value: Any) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            if id(value) in self._copies:
                return NotImplemented
            kind = type(value) is torch.nn.Parameter, value.requires_grad and value.is_leaf, dict(vars(value))
            is_large = value.numel() > 1 and (value.is_floating_point() or value.nbytes > _MOST_BYTES)
            if value.is_meta or (is_large and not self._with_values):
                return _made_of_shape, (tuple(value.shape), value.stride(), value.dtype, *kind)
            copy = value.detach().cpu().clone()
            self._copies[id(copy)] = copy
            return _made, (copy, *kind)
        if type(value).__name__ == "Trainer" and hasattr(value, "fit_loop"):
            return type(None), ()
        return NotImplemented


_MOST_BYTES = 1 << 24


def _made_of_shape(shape: Any, stride: Any, dtype: Any, *kind: Any) -> Any:
    return _made(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), *kind)


def _made(tensor: torch.Tensor, is_parameter: bool, is_trained: bool, attributes: dict[str, Any]) -> Any:
    made = torch.nn.Parameter(tensor, is_trained) if is_parameter else tensor.requires_grad_(is_trained)
    vars(made).update(attributes)
    return made


def _run_here(function: Callable[[], T], with_values: bool) -> T:
    """Run a function on a copy of what it holds, in this process."""
    buffer = io.BytesIO()
    try:
        _ShapePickler(buffer, with_values).dump(function)
        copy: Callable[[], T] = pickle.loads(buffer.getvalue())  # nosec B301
    except Exception as error:  # objects raise what they like when they are asked for their state
        raise NoProcessError(f"this system has no forks, and what is traced can't be copied: {error}") from error
    return copy()


class _SharingPickler(pickle.Pickler):
    """Writes objects that both processes have as their places among them."""

    def __init__(self, file: io.BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file)
        self._places = {id(value): place for place, value in enumerate(shared)}

    @override
    def persistent_id(self, value: Any) -> int | None:
        place = self._places.get(id(value))
        if place is None and isinstance(value, torch.nn.Module):
            raise pickle.PicklingError("a module, with all of its weights")
        return place


class _SharingUnpickler(pickle.Unpickler):
    """Reads what a `_SharingPickler` wrote."""

    def __init__(self, file: io.BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file)
        self._shared = shared

    @override
    def persistent_load(self, place: int) -> object:
        return self._shared[place]
