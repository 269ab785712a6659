"""Steps that change globals, objects and settings outside of the module."""

import contextvars
import ctypes
import functools
import io
import itertools
import locale
import logging
import mmap
import os
import random
import signal
import sys
import warnings
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from tests.zoo.classifier import WIDTH, Classifier

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
        global MAPPED
        super().__init__()
        self.act = act
        MAPPED = mmap.mmap(-1, 3)  # forks share a mapping, so that each trial needs its own

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


def change_libraries(module: Any, loss: Any) -> None:
    def relu(x: Any, inplace: bool = False) -> Any:
        return torch.clamp(x, min=0)

    torch.nn.functional.relu = relu
    torch.nn.Linear.steps_of_this_test = getattr(torch.nn.Linear, "steps_of_this_test", 0) + 1
    torch.nn.Linear.extra_repr = lambda self: "changed"  # type: ignore[method-assign]


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
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.autograd.set_detect_anomaly(True)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_math_sdp(False)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.nn.functional.silu = torch.relu  # type: ignore[assignment]


def set_threads(module: Any, loss: Any) -> None:
    """Only where nothing is computed: OpenMP can't start threads in a forked process."""
    torch.set_num_threads(3)


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


ALL_CHANGES = [*CHANGES, change_libraries, set_process, set_torch]
