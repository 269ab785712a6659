"""What a trial step changes outside of its copy is put back."""

import collections
import contextvars
import copy
import csv
import ctypes
import functools
import importlib
import io
import itertools
import locale
import logging
import mmap
import os
import queue
import random
import signal
import sqlite3
import sys
import warnings
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.copying import UncopiedError
from lightning_memfit.profile.outside import kept_outside
from lightning_memfit.profile.trace import TraceError
from tests.truth.profile.modules import WIDTH, Classifier, batch

COUNT = 0
ITEMS: list[Any] = [1, [2]]
BY_NAME: dict[str, Any] = {"a": {"b": [1]}}
ORDERED = OrderedDict(a=1, b=2)
COUNTED = Counter("abc")
DEFAULTS: Any = defaultdict(list, {"a": [1]})
SEEN = {1, 2}
RECENT: deque[Any] = deque([1, 2], maxlen=2)
RAW = bytearray(b"abc")
NUMBERS = array("i", [1, 2])
TABLE = np.zeros(4)
LARGE_TABLE = np.zeros(1_000_000)
WEIGHTS = torch.zeros(4)
LARGE_WEIGHTS = torch.zeros(1_000_000)
GENERATOR = np.random.default_rng(0)
TORCH_GENERATOR = torch.Generator().manual_seed(0)
PYTHON_GENERATOR = random.Random(0)
NUMBERED = itertools.count(3)
STREAM = iter([1, 2, 3])
TEACHER = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
LOG = logging.getLogger("tests.outside")


class Key:
    """Can be referred to weakly."""


KEYS = [Key(), Key()]
BY_KEY: Any = weakref.WeakKeyDictionary({KEYS[0]: [1]})
WEAK_VALUES: Any = weakref.WeakValueDictionary({"a": KEYS[0]})
WEAK_SET: Any = weakref.WeakSet(KEYS[:1])
CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("CONTEXT", default=None)
NEW_CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("NEW_CONTEXT")
HELD: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("HELD")
CONTEXT.set(1)
HELD.set([1])
IN_MEMORY = io.BytesIO(b"abc")
TEXT = io.StringIO("abc")
VIEW = memoryview(bytearray(b"abc"))
MAPPED = mmap.mmap(-1, 3)
NATIVE = (ctypes.c_int * 2)(1, 2)
OBJECTS = np.array([[1], {"a": 1}, None], dtype=object)
RECORDS = np.array([(1, [1])], dtype=[("a", int), ("b", object)])
LIST_WITH_STREAM = [iter([1, 2, 3])]


class Tracker:
    total = 0
    names: ClassVar[list[str]] = []
    __slots__ = ("best", "history")

    def __init__(self) -> None:
        self.best = 1.0
        self.history = [1.0]


class Settings:
    def __init__(self) -> None:
        self.rate = 0.1
        self.inner = Tracker()


TRACKER = Tracker()
SETTINGS = Settings()


def with_defaults(item: Any, seen: list[Any] = [], *, more: dict[str, Any] = {}) -> None:  # noqa: B006
    seen.append(item)
    more["item"] = item
    with_defaults.calls = getattr(with_defaults, "calls", 0) + 1  # type: ignore[attr-defined]


def make_counter() -> Callable[[Any], int]:
    count, seen = 0, []

    def counter(item: Any) -> int:
        nonlocal count
        count += 1
        seen.append(item)
        return count

    return counter


COUNTER = make_counter()


@functools.cache
def mask(size: int) -> torch.Tensor:
    return torch.ones(size)


@functools.lru_cache(maxsize=2)
def small_mask(size: int) -> torch.Tensor:
    return torch.ones(size)


class Doing(Classifier):
    """Does something in every step, with the loss."""

    calls = 0
    losses: ClassVar[list[Any]] = []

    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.act = act

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.act(self, loss)
        return loss


def described(value: Any, depth: int = 8) -> Any:
    """A deep description of an object, by its contents."""
    if depth == 0:
        return type(value).__name__
    if isinstance(value, FakeTensor):
        return "fake"
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.requires_grad, described(value.grad) if value.is_leaf else None
    if isinstance(value, np.ndarray):
        return described(value.tolist(), depth - 1) if value.dtype.hasobject else value.tobytes()
    if isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return [(id(key), described(one, depth - 1)) for key, one in value.items()]
    if isinstance(value, weakref.WeakSet):
        return set(map(id, value))
    if isinstance(value, contextvars.ContextVar):
        return described(value.get("none"), depth - 1)
    if isinstance(value, (io.BytesIO, io.StringIO)):
        return value.getvalue(), value.tell()
    if isinstance(value, (memoryview, mmap.mmap, ctypes.Array)):
        return bytes(value)
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, dict):
        return [(key, described(one, depth - 1)) for key, one in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [described(one, depth - 1) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, type) and value.__module__ == __name__:
        return described(dict(vars(value)), depth - 1)
    if callable(value) and hasattr(value, "__closure__"):
        cells = [described(cell.cell_contents, depth - 1) for cell in value.__closure__ or ()]
        return cells, described([value.__defaults__, value.__kwdefaults__, vars(value)], depth - 1)
    if hasattr(value, "cache_info"):
        return "cache"  # it may have been cleared
    if hasattr(value, "__length_hint__"):
        return value.__length_hint__()
    if isinstance(value, torch.nn.Module):
        return described(list(value.state_dict().items()), depth - 1), value.training
    if type(value).__module__ == __name__:
        slots = {name: getattr(value, name, None) for name in getattr(value, "__slots__", ())}
        return described({**getattr(value, "__dict__", {}), **slots}, depth - 1)
    return repr(value)


def of_globals() -> dict[str, Any]:
    return {name: described(value) for name, value in globals().items() if not name.startswith(("__", "@", "test_"))}


def rebind(module: Any, loss: Any) -> None:
    global COUNT, NEW
    COUNT += 1
    NEW = loss  # type: ignore[name-defined]


def change_containers(module: Any, loss: Any) -> None:
    ITEMS.append(loss)
    ITEMS[1].append(loss)
    BY_NAME["a"]["b"].append(loss)
    BY_NAME["c"] = loss
    ORDERED.move_to_end("a")
    COUNTED.update("aaa")
    DEFAULTS["new"].append(loss)
    SEEN.add(3)
    RECENT.append(loss)
    RAW.append(1)
    NUMBERS.append(3)


def delete_entries(module: Any, loss: Any) -> None:
    ITEMS.clear()
    BY_NAME.pop("a", None)
    SEEN.discard(1)
    RECENT.clear()
    ORDERED.pop("a", None)


def change_objects(module: Any, loss: Any) -> None:
    TRACKER.best = loss
    TRACKER.history.append(loss)
    Tracker.total += 1
    Tracker.names.append("a")
    SETTINGS.rate *= 2
    SETTINGS.inner.best = loss
    SETTINGS.more = loss  # type: ignore[attr-defined]
    Doing.calls += 1
    type(module).losses.append(loss)
    type(module).latest = loss


def call_functions(module: Any, loss: Any) -> None:
    with_defaults(loss)
    COUNTER(loss)
    mask(3)
    small_mask(3)


def draw(module: Any, loss: Any) -> None:
    GENERATOR.random()
    TORCH_GENERATOR.manual_seed(3)
    PYTHON_GENERATOR.random()
    random.random()
    np.random.rand()  # noqa: NPY002
    next(NUMBERED)
    next(STREAM, None)


def change_numbers(module: Any, loss: Any) -> None:
    TABLE[0] += 1
    with torch.no_grad():
        WEIGHTS.add_(1)
    WEIGHTS.requires_grad_()


def run_teacher(module: Any, loss: Any) -> None:
    TEACHER.train(not TEACHER.training)
    TEACHER(torch.ones(3, WIDTH)).sum().backward()


def change_weak(module: Any, loss: Any) -> None:
    BY_KEY[KEYS[0]].append(loss)
    BY_KEY[KEYS[1]] = loss
    WEAK_VALUES["b"] = KEYS[1]
    WEAK_SET.add(KEYS[1])
    WEAK_SET.discard(KEYS[0])


def change_context(module: Any, loss: Any) -> None:
    CONTEXT.set(loss)
    NEW_CONTEXT.set(loss)
    HELD.get().append(loss)


def change_memory(module: Any, loss: Any) -> None:
    IN_MEMORY.write(b"xyz123")
    TEXT.seek(0, io.SEEK_END)
    TEXT.write("x")
    VIEW[0] = 0
    MAPPED[0] = 1
    NATIVE[0] = 3


def change_object_arrays(module: Any, loss: Any) -> None:
    OBJECTS[0].append(loss)
    OBJECTS[2] = loss
    RECORDS[0]["b"].append(loss)
    RECORDS["a"] = 2


def move_in_list(module: Any, loss: Any) -> None:
    next(LIST_WITH_STREAM[0], None)


def change_closure(module: Any, loss: Any) -> None:
    module.hidden(loss)


CHANGES = [
    rebind,
    change_containers,
    delete_entries,
    change_objects,
    call_functions,
    draw,
    change_numbers,
    run_teacher,
    change_weak,
    change_context,
    change_memory,
    change_object_arrays,
    move_in_list,
]


@pytest.mark.parametrize("profile", [profile_module, measure_step])
@pytest.mark.parametrize("act", CHANGES)
def test_globals_are_put_back(profile: Callable[..., Any], act: Callable[..., Any]) -> None:
    mask.cache_clear()
    mask(2), small_mask(2)
    before = of_globals()
    profile(Doing(act), batch())
    after = of_globals()
    assert after.keys() == before.keys()
    for name in before:
        assert after[name] == before[name], name
    assert mask.cache_info().currsize == 1
    assert not any(isinstance(function(size), FakeTensor) for function in (mask, small_mask) for size in (2, 3))


def change_libraries(module: Any, loss: Any) -> None:
    def relu(x: Any, inplace: bool = False) -> Any:
        return torch.clamp(x, min=0)

    torch.nn.functional.relu = relu
    torch.nn.Linear.steps_of_this_test = getattr(torch.nn.Linear, "steps_of_this_test", 0) + 1
    torch.nn.Linear.extra_repr = lambda self: "changed"  # type: ignore[method-assign]


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_names_in_libraries_are_put_back(profile: Callable[..., Any]) -> None:
    names = ((torch.nn.functional, "relu"), (torch.nn.Linear, "steps_of_this_test"), (torch.nn.Linear, "extra_repr"))
    before = [vars(owner).get(name) for owner, name in names]
    profile(Doing(change_libraries), batch())
    after = [vars(owner).get(name) for owner, name in names]
    for (owner, name), one in zip(names, before, strict=True):  # the tests that follow need them, whatever comes out
        if one is not None:
            setattr(owner, name, one)
        elif name in vars(owner):
            delattr(owner, name)
    assert after == before


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_closures_of_what_a_module_holds_are_put_back(profile: Callable[..., Any]) -> None:
    seen: list[Any] = []
    calls = 0

    class Hooked(Classifier):
        count = 0

        def __init__(self) -> None:
            super().__init__()
            self.net.register_forward_hook(lambda *_: seen.append(_))

        @override
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nonlocal calls
            calls += 1
            Hooked.count += 1
            return self.loss(batch)

    profile(Hooked(), batch())
    assert (seen, calls, Hooked.count) == ([], 0, 0)


def set_process(module: Any, loss: Any) -> None:
    os.environ["NEW_VARIABLE"] = "1"
    os.environ.pop("HOME", None)
    os.chdir("/")
    os.umask(0o77)
    sys.path.append("/nowhere")
    warnings.simplefilter("error")
    logging.getLogger("tests.outside").setLevel(logging.ERROR)
    logging.getLogger("tests.outside").addHandler(logging.NullHandler())
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    locale.setlocale(locale.LC_ALL, "C")
    sys.setrecursionlimit(5000)
    np.seterr(all="raise")


def set_torch(module: Any, loss: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.autograd.set_detect_anomaly(True)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_math_sdp(False)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.nn.functional.silu = torch.relu  # type: ignore[assignment]


def process() -> dict[str, Any]:
    mask = os.umask(0)
    os.umask(mask)
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": mask,
        "path": list(sys.path),
        "warnings": list(warnings.filters),
        "level": LOG.level,
        "handlers": list(LOG.handlers),
        "disabled": logging.root.manager.disable,
        "signal": signal.getsignal(signal.SIGUSR1),
        "locale": locale.setlocale(locale.LC_ALL),
        "recursion": sys.getrecursionlimit(),
        "numpy": np.geterr(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "precision": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "attention": torch.backends.cuda.math_sdp_enabled(),
        "autocast": torch.get_autocast_dtype("cpu"),
        "silu": torch.nn.functional.silu,
    }


@pytest.mark.parametrize("profile", [profile_module, measure_step])
@pytest.mark.parametrize("act", [set_process, set_torch])
def test_settings_are_put_back(profile: Callable[..., Any], act: Callable[..., Any]) -> None:
    profile(Classifier(), batch())  # what Lightning sets once
    before = process()
    with warnings.catch_warnings():
        profile(Doing(act), batch())
        after = process()
    assert after == before


# --- what can't be put back -------------------------------------------------------------------------------------------


def numbers() -> Any:
    yield from range(100)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda *_: LARGE_TABLE.__iadd__(1), "changes `.*LARGE_TABLE`, which can't be put back"),
        (lambda *_: LARGE_WEIGHTS.add_(1), "changes `.*LARGE_WEIGHTS`, which can't be put back"),
    ],
)
def test_large_data_is_refused_by_name(act: Callable[..., Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        measure_step(Doing(act), batch())


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_generator_is_not_moved(profile: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = numbers()
    monkeypatch.setitem(globals(), "NUMBERS", stream)
    with pytest.raises((TraceError, UncopiedError), match=r"NUMBERS`, a generator that can't be copied"):
        profile(Doing(lambda *_: next(NUMBERS)), batch())  # type: ignore[call-overload]
    assert NUMBERS is stream  # type: ignore[comparison-overlap]
    assert next(stream) == 0


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_open_files_of_globals_are_not_written(
    profile: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "read.txt").write_text("a\nb\nc\n")
    with open(tmp_path / "log.txt", "w") as file, open(tmp_path / "read.txt") as reading:
        writer = csv.writer(file)
        monkeypatch.setitem(globals(), "FILES", [file, writer])
        monkeypatch.setitem(globals(), "FILE", file)
        monkeypatch.setitem(globals(), "WRITER", writer)
        monkeypatch.setitem(globals(), "READING", reading)

        def write(module: Any, loss: Any) -> None:
            FILE.write("x")  # type: ignore[name-defined]  # noqa: F821
            print("x", file=FILE)  # type: ignore[name-defined]  # noqa: F821
            WRITER.writerow([1])  # type: ignore[name-defined]  # noqa: F821
            READING.read(2)  # type: ignore[name-defined]  # noqa: F821
            file.write("y")

        profile(Doing(write), batch())
        assert reading.read() == "a\nb\nc\n"
        file.write("after\n")
    assert (tmp_path / "log.txt").read_text() == "after\n"


def test_database_of_globals_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    base = sqlite3.connect(":memory:")
    base.execute("create table runs (loss)")
    monkeypatch.setitem(globals(), "BASE", base)
    with pytest.raises(UncopiedError, match="BASE`, a Connection"):
        measure_step(Doing(lambda *_: BASE.execute("insert into runs values (1)")), batch())  # type: ignore[name-defined]  # noqa: F821
    assert base.execute("select count(*) from runs").fetchone() == (0,)


SIMPLE: queue.SimpleQueue[int] = queue.SimpleQueue()

MOVED: dict[str, Callable[[], Any]] = {
    "enumerate": lambda: enumerate([1, 2]),
    "zip": lambda: zip([1, 2], [3, 4], strict=True),
    "map": lambda: map(str, [1, 2]),
    "filter": lambda: filter(None, [1, 2]),
    "cycle": lambda: itertools.cycle([1, 2]),
    "reversed": lambda: reversed([1, 2]),
    "keys": lambda: iter({1: 2}),
}


@pytest.mark.parametrize("name", MOVED)
def test_iterator_is_not_moved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, expected = MOVED[name](), next(MOVED[name]())
    monkeypatch.setitem(globals(), "MOVING", moved)
    with pytest.raises(UncopiedError, match="MOVING`"):
        measure_step(Doing(lambda *_: next(MOVING)), batch())  # type: ignore[name-defined]  # noqa: F821
    assert globals()["MOVING"] is moved
    assert next(moved) == expected


def test_queue_of_the_program_is_left_alone() -> None:
    with pytest.raises(UncopiedError, match="SIMPLE`, a SimpleQueue"):
        measure_step(Doing(lambda *_: SIMPLE.put(1)), batch())
    assert SIMPLE.empty()


def test_caches_keep_what_they_had() -> None:
    small_mask.cache_clear()
    mask.cache_clear()
    first, second = small_mask(1), mask(1)
    measure_step(Doing(lambda *_: (small_mask(2), mask(2), mask(3))), batch())
    assert small_mask.cache_info().currsize == mask.cache_info().currsize == 1
    assert small_mask(1) is first
    assert mask(1) is second
    for size in (4, 5, 6):  # it goes on as before
        small_mask(size)
    assert small_mask(6) is small_mask(6)
    assert small_mask.cache_info().currsize == 2


def test_cache_that_has_lost_results_is_refused_by_name() -> None:
    small_mask.cache_clear()
    small_mask(1), small_mask(2)
    with pytest.raises(TraceError, match="changes `.*small_mask`, which can't be put back"):
        measure_step(Doing(lambda *_: small_mask(3)), batch())
    assert not isinstance(small_mask(3), FakeTensor)


# --- the notes themselves ---------------------------------------------------------------------------------------------


def test_everything_is_put_back_after_an_error() -> None:
    before = of_globals()
    with pytest.raises(ZeroDivisionError), kept_outside(Doing(change_objects)):
        change_containers(None, 1)
        change_objects(Doing(change_objects), 1)
        call_functions(None, 1)
        raise ZeroDivisionError
    assert of_globals() == before


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file of the user's that no other imports at its top."""
    (tmp_path / "far_away.py").write_text("COUNTS = {'steps': 0}\nVALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("far_away")
    del sys.modules["far_away"]


class Imports(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import far_away  # type: ignore[import-not-found]

        far_away.COUNTS["steps"] += 1
        return self.loss(batch)


class LooksUp(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sys.modules["far_away"].VALUE += 1
        importlib.import_module("far_away").COUNTS["steps"] += 1
        return self.loss(batch)


@pytest.mark.parametrize("kind", [Imports, LooksUp])
def test_globals_of_files_that_only_the_step_imports_are_put_back(far: Any, kind: type[Classifier]) -> None:
    measure_step(kind(), batch())
    assert (far.COUNTS, far.VALUE) == ({"steps": 0}, 1)


@pytest.mark.parametrize("level", ["from .. import counts", "from ..counts import COUNTS", "from .near import COUNTS"])
def test_globals_of_files_that_only_the_step_imports_relatively_are_put_back(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = "counts.COUNTS" if level.endswith("counts") else "COUNTS"
    package = tmp_path.name  # which no code here has as a string
    inner = tmp_path / package / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").touch()
    (inner / "__init__.py").touch()
    for counts in (inner.parent / "counts.py", inner / "near.py"):
        counts.write_text("COUNTS = {'steps': 0}\n")
    (inner / "net.py").write_text(f"def count(*_):\n    {level}\n    {named}['steps'] += 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = [f"{package}.{name}" for name in ("inner.net", "counts", "inner.near")]
    net, counts, near = map(importlib.import_module, names)
    measure_step(Doing(net.count), batch())
    for name in (package, f"{package}.inner", *names):
        del sys.modules[name]
    assert counts.COUNTS == near.COUNTS == {"steps": 0}


def test_files_that_a_step_never_names_are_not_read(far: Any) -> None:
    with kept_outside(Imports()) as outside:
        named = {name for _, _, name in outside.numbers()}
    assert any("far_away" in name for name in named)
    with kept_outside(Classifier()) as outside:
        assert not any("far_away" in name for _, _, name in outside.numbers())


def test_nothing_is_touched_that_has_not_changed() -> None:
    version, items = WEIGHTS._version, copy.copy(ITEMS)
    before = {name: id(value) for name, value in globals().items()}
    with kept_outside(Doing(change_objects)):
        pass
    assert WEIGHTS._version == version
    assert collections.Counter(map(id, ITEMS)) == collections.Counter(map(id, items))
    assert {name: id(value) for name, value in globals().items()} == before
