"""What a trial step changes outside of its copy is put back."""

import collections
import copy
import csv
import importlib
import itertools
import queue
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.copying import UncopiedError
from lightning_memfit.profile.outside import kept_outside
from lightning_memfit.profile.trace import TraceError
from tests.truth.profile.modules import Classifier, batch
from tests.zoo.surroundings import (
    ITEMS,
    LARGE_TABLE,
    LARGE_WEIGHTS,
    NUMBERS,
    WEIGHTS,
    Doing,
    call_functions,
    change_containers,
    change_objects,
    mask,
    of_globals,
    small_mask,
)


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
