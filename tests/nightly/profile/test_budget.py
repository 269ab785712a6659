"""Where runs end at the latest: by the clock, and by a watch over code that never looks at it."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_memfit.profile import budget as budgets
from lightning_memfit.profile.budget import Budget, LimitReached, TraceLimits
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.trace import TraceError
from tests.truth.profile.modules import Classifier, batch

# --- the clock --------------------------------------------------------------------------------------------------------


def _others_take_the_core(monkeypatch, share):
    """All but a share of the time is spent waiting for a core."""
    started = time.monotonic()
    monkeypatch.setattr(budgets, "_seconds_without_core", lambda _: (1 - share) * (time.monotonic() - started))


def test_time_without_a_core_does_not_count(monkeypatch):
    _others_take_the_core(monkeypatch, 0.02)
    budget = budgets.Budget(TraceLimits(seconds=0.05))
    time.sleep(0.1)
    budget.check_time()
    assert not budget.is_mostly_used


def test_time_with_a_core_counts(monkeypatch):
    _others_take_the_core(monkeypatch, 0.9)
    budget = budgets.Budget(TraceLimits(seconds=0.05))
    time.sleep(0.1)
    assert budget.is_mostly_used
    with pytest.raises(budgets.LimitReached):
        budget.check_time()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells")
def test_a_program_on_the_same_core_makes_it_wait():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the other program inherits it
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = budgets._seconds_without_core(threading.get_native_id())
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass
        assert budgets._seconds_without_core(threading.get_native_id()) - before > 0.2
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()


@pytest.mark.parametrize("name", ["seconds", "batches", "operators"])
def test_limits_that_leave_no_room_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}=0`"):
        TraceLimits(**{name: 0})


# --- code that never looks at the clock -------------------------------------------------------------------------------


def turn(module):
    while True:
        pass


def turn_and_catch(module):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def wait_for_itself(module):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


RELEASED = threading.Event()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    RELEASED.set()
    globals()["RELEASED"] = threading.Event()


def wait_for_a_thread(module):
    thread = threading.Thread(target=RELEASED.wait, daemon=True)
    thread.start()
    thread.join()


NEVER = {
    "loop": turn,
    "loop that catches": turn_and_catch,
    "lock": wait_for_itself,
    "event": lambda module: threading.Event().wait(),
    "thread": wait_for_a_thread,
    "queue of its own": lambda module: queue.Queue().get(),
    "queue of the module": lambda module: module.waiting.get(),
    "sleep": lambda module: time.sleep(1000),
    "pipe": lambda module: os.read(os.pipe()[0], 1),
}


class Doing(Classifier):
    def __init__(self, act):
        super().__init__()
        self.act, self.waiting = act, queue.Queue()

    def training_step(self, batch, batch_idx):
        self.act(self)
        return self.loss(batch)


@pytest.mark.nightly_cases(
    "measure_step-event",
    "measure_step-lock",
    "measure_step-pipe",
    "measure_step-queue of",
    "measure_step-sleep",
    "measure_step-thread",
)
@pytest.mark.parametrize("name", NEVER)
@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_a_step_that_never_ends_is_refused_with_its_line(profile, name):
    started, before = time.monotonic(), signal.getsignal(signal.SIGURG)
    with pytest.raises(
        TraceError, match=r"was not known after 1 s, the last of them without an operator at .*test_budget.py:\d+, in `"
    ):
        profile(Doing(NEVER[name]), batch(), limits=TraceLimits(seconds=1))
    assert time.monotonic() - started < 30
    assert signal.getsignal(signal.SIGURG) is before


def test_so_it_is_in_another_thread():
    errors = []

    def trace():
        try:
            profile_module(Doing(turn), batch(), limits=TraceLimits(seconds=1))
        except TraceError as error:
            errors.append(str(error))

    thread = threading.Thread(target=trace)
    thread.start()
    thread.join(60)
    assert "was not known after 1 s, the last of them without an operator at" in errors[0]
    assert "in `turn`" in errors[0]


def test_so_it_is_where_the_program_uses_the_signal():
    before = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        with pytest.raises(TraceError, match="was not known after 1 s, .* at .*in `turn`"):
            profile_module(Doing(turn), batch(), limits=TraceLimits(seconds=1))
    finally:
        signal.signal(signal.SIGURG, before)


class Acts(torch.nn.Module):
    """No LightningModule."""

    def __init__(self, act):
        super().__init__()
        self.net, self.act = torch.nn.Linear(2, 2), act

    def forward(self, x):
        self.act()
        return self.net(x)


@pytest.mark.parametrize("profile", [profile_module, measure_step])
@pytest.mark.parametrize(
    ("act", "reason"),
    [(lambda: queue.Queue().get(), "was not known after 1 s, .* at .*in `"), (lambda: sys.exit(3), "ends the program")],
)
def test_a_hugging_face_model_that_does_not_go_on_is_refused(profile, act, reason):
    with pytest.raises(TraceError, match=reason):
        profile(
            Acts(act),
            {"x": torch.zeros(1, 2)},
            make_optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.1),
            limits=TraceLimits(seconds=1),
        )


class BuildsItself(Classifier):
    def configure_model(self):
        self.built = True


class Meets(BuildsItself):
    """Does something before the first step."""

    def __init__(self, place, act):
        super().__init__()
        self.place, self.act, self.is_set_up = place, act, False

    def _meet(self, place):
        if self.place == place:
            self.act(self)

    def configure_model(self):
        super().configure_model()
        self._meet("configure_model")

    def setup(self, stage):
        self._meet("setup")
        self.net.requires_grad_(True)

    def configure_optimizers(self):
        self._meet("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self):
        self._meet("on_fit_start")
        self.net.requires_grad_(True)

    def __getstate__(self):
        self._meet("copy")
        return vars(self).copy()


@pytest.mark.parametrize("place", ["configure_model", "setup", "configure_optimizers", "on_fit_start", "copy"])
@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_so_it_is_before_the_first_step(profile, place):
    with pytest.raises(TraceError, match=r"was not known after 0.5 s, the last .* at .*test_budget.py:\d+, in `turn`"):
        profile(Meets(place, turn), batch(), limits=TraceLimits(seconds=0.5))


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_so_it_is_in_the_making_of_an_optimizer(profile):
    with pytest.raises(TraceError, match="was not known after 0.5 s, .* at .*in `turn`"):
        profile(Acts(lambda: None), {"x": torch.zeros(1, 2)}, make_optimizer=turn, limits=TraceLimits(seconds=0.5))


def test_time_before_the_first_batch_is_not_that_of_the_steps():
    known = measure_step(Meets("setup", lambda module: time.sleep(1)), batch(), limits=TraceLimits(seconds=1.5))
    assert known.traced_batches >= 2


def test_the_innermost_budget_counts():
    outer, inner = Budget(TraceLimits(seconds=0.5)), Budget(TraceLimits(seconds=3))
    with outer.enforced():
        inner.start()
        with inner.enforced():
            time.sleep(2)
        with pytest.raises(LimitReached, match=r"0\.5 s"):
            time.sleep(30)


def test_what_calls_operators_is_not_interrupted():
    """It looks at the clock itself."""
    budget = Budget(TraceLimits(seconds=0.5))
    with budget.enforced():
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            budget.operators += 1
            time.sleep(0.05)


def test_nothing_is_raised_after_the_end():
    budget = Budget(TraceLimits(seconds=0.5))
    with pytest.raises(LimitReached), budget.enforced():
        time.sleep(30)
    time.sleep(1.2)


# --- what must not be ended -------------------------------------------------------------------------------------------


def _of_this_package(source):
    """A function as if it were written in this package."""
    names = {"time": time}
    exec(compile(source, budgets.__file__, "exec"), names)
    return names["run"]


def test_clean_up_of_our_own_is_not_interrupted():
    run = _of_this_package("def run(budget, *_):\n with budget.enforced():\n  time.sleep(1.5)")
    run(Budget(TraceLimits(seconds=0.5)))


def test_clean_up_of_our_own_goes_on_after_the_end_of_a_step():
    """What has been interrupted in the user's code is interrupted there only."""
    run = _of_this_package(
        "def run(budget, act):\n with budget.enforced():\n  try: act()\n  finally: time.sleep(1.5); budget.done = True"
    )
    budget = Budget(TraceLimits(seconds=0.5))
    with pytest.raises(LimitReached):
        run(budget, lambda: time.sleep(30))
    assert budget.done


def test_a_step_that_catches_everything_is_interrupted_again():
    run = _of_this_package("def run(budget, act):\n with budget.enforced():\n  act()")
    caught = []

    def act():
        for _ in range(2):
            try:
                time.sleep(30)
            except BaseException as error:
                caught.append(error)
        raise caught[-1]

    with pytest.raises(LimitReached):
        run(Budget(TraceLimits(seconds=0.5)), act)
    assert caught[0] is not caught[1]


@pytest.mark.parametrize("is_main", [True, False])
def test_a_run_that_ends_while_it_is_looked_at_is_not_interrupted(monkeypatch, is_main):
    looked, ended, errors = threading.Event(), threading.Event(), []

    def look(thread=None):
        looked.set()
        ended.wait(10)
        return ""

    monkeypatch.setattr(budgets, "calling_line", look)

    def run():
        try:
            with Budget(TraceLimits(seconds=0.5)).enforced():
                assert looked.wait(10)
            ended.set()
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                time.sleep(0.01)
        except LimitReached as error:
            errors.append(error)

    if is_main:
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert not errors


def test_a_run_within_another_takes_none_of_its_time():
    outer, inner = Budget(TraceLimits(seconds=1)), Budget(TraceLimits(seconds=10))
    with outer.enforced():
        with inner.enforced():
            time.sleep(1.2)
        outer.check_time()
        assert not outer._is_over(0.5)
