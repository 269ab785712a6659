"""What a step draws from iterators that the module holds is given again after trial steps and failed attempts."""

import csv
import itertools
import queue
import types
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memfit import MemoryLimit, MicroBatching
from lightning_memfit.fitting.recovery.rollback import Rollback, TrainingSnapshot
from lightning_memfit.fitting.recovery.step_state import release_iterators
from tests.helpers.fitting import out_of_memory

CPU = torch.device("cpu")


class Slotted:
    """An iterator without a `__dict__`."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> int:
        self.at += 1
        return self.at


class Endless:
    """An iterator that begins again."""

    def __init__(self) -> None:
        self.loader = DataLoader(torch.arange(3.0), 1)
        self.iterator = iter(self.loader)

    def __next__(self) -> Any:
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)


class Queued:
    """An iterator whose items come from a queue, which nobody can look into."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[int] = queue.Queue()
        for number in range(20):
            self.waiting.put(number)

    def __next__(self) -> int:
        return self.waiting.get_nowait()


def _generator() -> Iterator[float]:
    for number in range(20):
        yield number / 2


MADE: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: iter(list(range(20))),
    "generator": lambda _: _generator(),
    "enumerate": lambda _: enumerate("abcdefghijkl"),
    "zip": lambda _: zip(range(20), _generator(), strict=False),
    "cycle": lambda _: itertools.cycle([1, 2, 3]),
    "loader": lambda _: iter(DataLoader(torch.arange(20.0), 2)),
    "combined": lambda _: iter(CombinedLoader([DataLoader(torch.arange(20.0), 2), DataLoader(torch.ones(10), 1)])),
    "slots": lambda _: Slotted(),
    "endless": lambda _: Endless(),
    "queue": lambda _: Queued(),
    "csv": lambda file: csv.reader(file.read_text().splitlines()),
    "file": lambda file: file.open(),
    "binary file": lambda file: file.open("rb"),
}

PLACES: dict[str, Callable[[nn.Module, Any], Callable[[], Any]]] = {}


def _place(function: Callable[[nn.Module, Any], Callable[[], Any]]) -> Any:
    PLACES[function.__name__] = function
    return function


@_place
def attribute(module: Any, iterator: Any) -> Callable[[], Any]:
    module.it = iterator
    return lambda: next(module.it)


@_place
def submodule(module: Any, iterator: Any) -> Callable[[], Any]:
    module.child.it = iterator
    return lambda: next(module.child.it)


@_place
def containers(module: Any, iterator: Any) -> Callable[[], Any]:
    module.loaders = {"unlabelled": [(iterator, "name")]}
    return lambda: next(module.loaders["unlabelled"][0][0])


@_place
def queue_of_both_ends(module: Any, iterator: Any) -> Callable[[], Any]:
    module.loaders = deque([iterator])
    return lambda: next(module.loaders[0])


@_place
def plain_object(module: Any, iterator: Any) -> Callable[[], Any]:
    module.loaders = types.SimpleNamespace(inner=types.SimpleNamespace(it=iterator))
    return lambda: next(module.loaders.inner.it)


@_place
def closure(module: Any, iterator: Any) -> Callable[[], Any]:
    module.draw = lambda: next(iterator)
    return lambda: module.draw()


@_place
def callback(module: Any, iterator: Any) -> Callable[[], Any]:
    class Draws(pl.Callback):
        it = None

    one = Draws()
    one.it = iterator
    module.__dict__["_trainer"] = types.SimpleNamespace(callbacks=[one])
    return lambda: next(one.it)


class Module(nn.Module):
    """A module that holds an iterator somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.child = nn.Linear(1, 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.csv"
    path.write_text("".join(f"{number},{number}\n" for number in range(20)))
    return path


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def _check(module: nn.Module, draw: Callable[[], Any], expected: list[Any]) -> None:
    """Draw under a snapshot and in attempts of steps, all of which are taken back in between."""
    snapshot = TrainingSnapshot(module, (), CPU)
    for count in (3, 1):
        assert _same([draw() for _ in range(count)], expected[:count])
        snapshot.restore()
    del snapshot
    rollback, at = Rollback(module, CPU), 0
    for step in range(12):  # of which the first eight are looked at
        point = rollback.save()
        count = 2 if step in (3, 11) else 0 if step in (6, 7) else 1
        for _ in range(count):
            draw()
        if step % 3 == 2:
            rollback.load(point)
            count = 0
        at += count
    assert at == 7
    assert _same([draw() for _ in range(2)], expected[7:9])


@pytest.mark.parametrize("kind", MADE)
def test_items_are_given_again(kind: str, file: Path) -> None:
    module, made = Module(), MADE[kind](file)
    expected = [next(one) for one in [MADE[kind](file)] for _ in range(10)]
    _check(module, attribute(module, made), expected)


@pytest.mark.parametrize("place", PLACES)
def test_iterators_are_found_where_a_module_holds_them(place: str) -> None:
    module = Module()
    draw = PLACES[place](module, _generator())
    _check(module, draw, [number / 2 for number in range(10)])


def test_an_iterator_is_released_once_nothing_waits() -> None:
    module: Any = Module()
    module.it = iterator = _generator()
    module.pair = (iterator, 1)
    snapshot = TrainingSnapshot(module, (), CPU)
    assert next(module.it) == 0.0
    assert next(module.pair[0]) == 0.5  # one iterator, wherever it is held
    snapshot.restore()
    release_iterators(module)
    assert module.it is not iterator
    assert isinstance(module.it, types.GeneratorType)
    assert [next(module.it), next(module.it)] == [0.0, 0.5]
    release_iterators(module)
    assert module.it is iterator
    assert module.pair[0] is iterator


def test_a_copy_goes_on_with_what_waits() -> None:
    module: Any = Module()
    module.it = iter([1, 2, 3])
    snapshot = TrainingSnapshot(module, (), CPU)
    assert next(module.it) == 1
    snapshot.restore()
    assert list(deepcopy(module).it) == [1, 2, 3]
    assert list(module.it) == [1, 2, 3]


def test_the_end_is_given_again() -> None:
    module: Any = Module()
    module.it = iter([1])
    snapshot = TrainingSnapshot(module, (), CPU)
    for _ in range(2):
        assert list(module.it) == [1]
        assert list(module.it) == []
        snapshot.restore()


@pytest.mark.parametrize("how", ["in place", "send", "memory"])
def test_what_cant_be_given_again_is_refused_by_name(how: str) -> None:
    def draws() -> Any:
        while True:
            if how == "memory":
                raise out_of_memory()
            yield torch.ones(2)

    module: Any = Module()
    module.it = draws()

    def step() -> None:
        if how == "send":
            module.it.send(None)
            module.it.send(1.0)
        else:
            next(module.it).mul_(2.0)

    snapshot = TrainingSnapshot(module, (), CPU)
    if how == "memory":
        with pytest.raises(torch.OutOfMemoryError):
            step()
    else:
        step()
    snapshot.restore()
    with pytest.raises(MisconfigurationException, match=r"the iterator `Module\.it` has to be repeated"):
        step()


def test_nothing_is_noted_while_nobody_goes_back() -> None:
    module: Any = Module()
    module.it = _generator()
    rollback = Rollback(module, CPU)
    for _ in range(10):
        point = rollback.save()
        next(module.it)
    notes = module.it._memfit_notes
    assert len(notes._draws) <= 2
    del point
    next(module.it)
    assert not notes._draws


FAILED: list[int] = []
"""Batches at which memory has run out. Attributes of the module are put back."""


class SemiSupervised(pl.LightningModule):
    """Learns from labelled batches of the Trainer's and from unlabelled ones that it draws itself."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1, bias=False)
        self.fails_at = fails_at

    @override
    def on_train_start(self) -> None:
        self.it = iter(DataLoader(torch.randn(400, 4, generator=torch.Generator().manual_seed(3)), 4))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean() + (self.net(next(self.it)) - 1).square().mean()
        if batch_idx == self.fails_at and not FAILED:
            FAILED.append(batch_idx)
            raise out_of_memory()
        return loss  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(48, 4, generator=torch.Generator().manual_seed(4)), 8)


def _fit(module: SemiSupervised, *callbacks: pl.Callback) -> tuple[Tensor, Tensor]:
    """Train, and return the weight and the next unlabelled batch."""
    FAILED.clear()
    nn.init.constant_(module.net.weight, 0.5)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module.net.weight.detach().clone(), next(module.it)


@pytest.mark.filterwarnings("ignore:Memory ran out")
@pytest.mark.parametrize("case", ["trial steps", "repetition", "micro-batches"])
def test_training_draws_what_the_plain_run_draws(case: str) -> None:
    weight, item = _fit(SemiSupervised())
    if case == "trial steps":
        found = _fit(SemiSupervised(), MicroBatching(), MemoryLimit("1MiB"))
    elif case == "repetition":
        found = _fit(SemiSupervised(fails_at=3), MicroBatching(micro_batch_size=8))
        assert FAILED
    else:
        found = _fit(SemiSupervised(), MicroBatching(micro_batch_size=3))
    torch.testing.assert_close(found[0], weight)
    assert torch.equal(found[1], item)
