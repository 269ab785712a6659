"""A trial step leaves alone what other threads do meanwhile."""

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.outside import NotKeptError, kept_outside
from lightning_memfit.profile.seal import sealed
from lightning_memfit.profile.threads import OtherThreads
from tests.truth.profile.modules import Classifier, batch

RESULTS: list[int] = []
COUNTS = {"theirs": 0, "ours": 0}
OTHERS = 0
OURS = 0
SHARED = 0
ASKED: Any = None
ENDED: Any = None


class Worker(threading.Thread):
    """Does something when told to.

    Args:
        act: What to do.
    """

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.act = act
        self.done = 0
        self.asked, self.ended = threading.Event(), threading.Event()

    def run(self) -> None:
        self.asked.wait(20)
        self.act()
        self.done += 1
        self.ended.set()

    def work(self) -> None:
        self.asked.set()
        assert self.ended.wait(20)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def fill(**values: Any) -> None:
        for name, value in values.items():
            monkeypatch.setitem(globals(), name, value)

    return fill


class Own(Classifier):
    """Reaches the global names of this file."""


@contextmanager
def trial() -> Iterator[None]:
    with kept_outside(Own()):
        yield


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_a_future_that_ends_meanwhile_stays_done(profile: Callable[..., Any], namespace: Callable[..., None]) -> None:
    asked, ended = threading.Event(), threading.Event()

    class Asking(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            asked.set()
            ended.wait(20)
            return self.loss(batch)

    with ThreadPoolExecutor(1) as pool:
        future: Future[Any] = pool.submit(lambda: asked.wait(20))
        future.add_done_callback(lambda _: ended.set())
        namespace(FUTURE=future, POOL=pool)
        profile(Asking(), batch())
        assert future.result(timeout=1)
        assert pool.submit(lambda: 1).result(timeout=5) == 1


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_attributes_of_the_module_that_another_thread_sets_stay(
    profile: Callable[..., Any], namespace: Callable[..., None]
) -> None:
    class Asking(Classifier):
        beats = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ASKED.set()
            ENDED.wait(20)
            return self.loss(batch)

    module, worker = Asking(), Worker(lambda: setattr(module, "beats", 3))
    worker.start()
    namespace(ASKED=worker.asked, ENDED=worker.ended)
    found = profile(module, batch())
    assert module.beats == 3
    assert not any("`beats`" in remark for remark in found.remarks)


def test_settings_that_another_thread_sets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> None:
        sys.setrecursionlimit(4321)
        os.environ["MEMFIT_TEST_THEIRS"] = "set"

    for name in ("THEIRS", "OURS"):
        monkeypatch.setenv(f"MEMFIT_TEST_{name}", "before")
    limit, worker = sys.getrecursionlimit(), Worker(act)
    worker.start()
    try:
        with kept_outside(Classifier()):
            worker.work()
            vars(os)["environ"]["MEMFIT_TEST_" + "OURS"] = "set"
        assert sys.getrecursionlimit() == 4321
        assert (os.environ["MEMFIT_TEST_THEIRS"], os.environ["MEMFIT_TEST_OURS"]) == ("set", "before")
    finally:
        sys.setrecursionlimit(limit)


class SetsALimit(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sys.setrecursionlimit(4321)
        return self.loss(batch)


def test_settings_that_both_may_have_set_are_refused() -> None:
    limit, worker = sys.getrecursionlimit(), Worker(lambda: sys.setrecursionlimit(4321))
    worker.start()
    try:
        with (
            pytest.raises(NotKeptError, match="setting `setrecursionlimit`.*another thread"),
            kept_outside(SetsALimit()),
        ):
            worker.work()
    finally:
        sys.setrecursionlimit(limit)


def test_several_threads_trace_one_after_the_other() -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(measure_step(Classifier(), batch()))) for _ in range(3)]
    globals()["THREADS"] = threads
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        del globals()["THREADS"]
    assert len(found) == 3


def test_what_threads_wait_by_is_never_set_back(namespace: Callable[..., None]) -> None:
    waiting: queue.Queue[int] = queue.Queue()
    condition, event, lock = threading.Condition(), threading.Event(), threading.Lock()

    def act() -> None:
        waiting.put(1)
        event.set()
        lock.acquire()
        with condition:
            condition.notify_all()

    worker = Worker(act)
    worker.start()
    namespace(QUEUE=waiting, CONDITION=condition, EVENT=event, LOCK=lock, WORKER=worker)
    with trial():
        worker.work()
        worker.join(20)
    assert waiting.get(timeout=1) == 1
    assert event.is_set()
    assert lock.locked()
    assert not worker.is_alive()
    assert not condition._waiters  # type: ignore[attr-defined]


def test_work_of_another_thread_stays_and_that_of_the_step_is_put_back(namespace: Callable[..., None]) -> None:
    global OURS

    def act() -> None:
        global OTHERS
        OTHERS += 1
        RESULTS.append(1)
        COUNTS["theirs"] += 1

    worker = Worker(act)
    worker.start()
    namespace(WORKER=worker, RESULTS=[], COUNTS=dict(COUNTS), OTHERS=0, OURS=0)
    with trial():
        worker.work()
        OURS += 1
    assert (OTHERS, OURS, RESULTS, worker.done) == (1, 0, [1], 1)
    assert COUNTS == {"theirs": 1, "ours": 0}


def test_work_that_a_pool_does_meanwhile_stays(namespace: Callable[..., None]) -> None:
    held: list[int] = []
    namespace(HELD=held, RESULTS=[])
    with ThreadPoolExecutor(1) as pool:
        waited = threading.Event()
        pool.submit(waited.wait, 20)
        future = pool.submit(held.append, 1)  # which begins and ends within the step
        with trial():
            waited.set()
            future.result(20)
    assert held == [1]


class Unrelated:
    """Has a method of a name that steps call, too, and names what the other thread changes."""

    def loss(self) -> int:
        global OTHERS
        OTHERS += 1
        return OTHERS


def test_namesakes_that_a_step_does_not_call_change_nothing(namespace: Callable[..., None]) -> None:
    def act() -> None:
        global OTHERS
        OTHERS += 1

    worker = Worker(act)
    worker.start()
    namespace(OTHERS=0)
    with trial():
        worker.work()
    assert OTHERS == 1


def test_what_both_may_have_changed_is_refused_by_name(namespace: Callable[..., None]) -> None:
    class Both(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            global SHARED
            SHARED += 1

    def act() -> None:
        global SHARED
        SHARED += 1

    worker = Worker(act)
    worker.start()
    namespace(SHARED=0)
    with pytest.raises(NotKeptError, match="another thread that runs meanwhile"), kept_outside(Both()):
        worker.work()
    assert SHARED == 1


def test_generator_goes_on_for_another_thread(namespace: Callable[..., None]) -> None:
    given: list[int] = []
    worker = Worker(lambda: given.append(next(globals()["STREAM"])))
    worker.start()
    stream = (number for number in range(3))
    namespace(STREAM=stream)
    with trial(), sealed():
        worker.work()
    assert given == [0]
    assert globals()["STREAM"] is stream
    assert next(stream) == 1


def test_thread_that_has_only_waited_has_changed_nothing() -> None:
    worker = Worker(lambda: None)
    worker.start()
    worker.join(0.1)
    others = OtherThreads(())
    with others.followed():
        pass
    assert not others
    worker.work()
