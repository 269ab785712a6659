import csv
import io
import multiprocessing
import queue
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.copying import Untouchable, copied
from lightning_memfit.profile.trace import Emulation, TraceError
from tests.truth.profile.modules import Classifier, batch, peak, trace_cpu, true_peak


class Holds(Classifier):
    """Holds what can't be copied, and uses it in its step."""

    def __init__(self, held, use=lambda held: None):
        super().__init__()
        self.held, self.use = held, use

    def training_step(self, batch, batch_idx):
        self.use(self.held)
        return self.loss(batch)


def within(lock):
    with lock:
        if hasattr(lock, "notify_all"):
            lock.notify_all()


def numbers():
    yield 1
    yield 2


class Worker(threading.Thread):
    """Takes what a logger puts into its queue, which holds two."""

    def __init__(self):
        super().__init__(daemon=True)
        self.waiting = queue.Queue(2)

    def log(self):
        for value in range(5):
            self.waiting.put(value)


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (threading.Lock, within),
        (threading.RLock, within),
        (threading.Condition, within),
        (threading.Event, lambda event: event.set()),
        (multiprocessing.Lock, within),
        (lambda: [threading.Lock() for _ in range(200)], lambda locks: within(locks[-1])),
        (Worker, lambda worker: worker.log()),
        (threading.local, lambda local: setattr(local, "value", 1)),
        (numbers, lambda held: None),
        (lambda: ThreadPoolExecutor(1), lambda held: None),
    ],
)
def test_modules_with_what_cannot_be_copied_are_traced_and_measured(make, use):
    module, expected = Holds(make(), use), trace_cpu(Classifier(), batch())
    assert peak(trace_cpu(module, batch()).events) == peak(expected.events)
    assert peak(measure_step(module, batch()).events) == pytest.approx(peak(expected.events), rel=1e-3)


def test_files_of_the_module_are_not_written(tmp_path):
    with (tmp_path / "log.csv").open("w") as file:
        writer = csv.writer(file)
        module = Holds((file, writer), lambda held: (held[0].write("text"), held[0].flush(), held[1].writerow([1])))
        trace_cpu(module, batch())
        measure_step(module, batch())
    assert (tmp_path / "log.csv").read_text() == ""


@pytest.mark.parametrize("run", [trace_cpu, measure_step])
def test_using_what_cannot_be_copied_is_refused_by_name_and_line(run, tmp_path):
    held = numbers()
    with pytest.raises(RuntimeError, match=r"`Holds.held`, a generator.*can't be copied.*__deepcopy__") as caught:
        run(Holds(held, next), batch())
    assert next(held) == 1  # nothing was taken from the module's own
    if isinstance(caught.value, TraceError):
        assert "test_copying.py, line" in str(caught.value)
        assert "measure" not in str(caught.value)


def test_a_lock_is_not_shared_and_stays_shared_among_copies():
    lock = threading.Lock()
    first, second = copied([lock, lock])
    assert first is second
    assert first is not lock
    condition = threading.Condition(lock)
    pair = copied({"lock": lock, "condition": condition})
    with pair["lock"]:
        assert not pair["condition"].acquire(blocking=False)
        assert lock.acquire(blocking=False)


def test_states_that_a_step_left_are_copied():
    layer = torch.nn.Linear(2, 2)
    layer.state = layer(torch.ones(1, 2))
    assert torch.equal(copied(layer).state, layer.state)


def test_objects_that_fail_to_copy_for_their_own_reasons_say_so():
    class Refuses(torch.nn.Linear):
        def __deepcopy__(self, memo):
            raise ValueError("only one of me")

    with pytest.raises(ValueError, match="only one of me"):
        copied(torch.nn.Sequential(Refuses(1, 1)))
    stand_in = copied([numbers()])[0]
    assert isinstance(stand_in, Untouchable)
    assert copied(stand_in) is stand_in
    assert "not copied" in repr(stand_in)
    assert not hasattr(stand_in, "__torch_function__")
    assert copied(io.StringIO("kept")).read() == "kept"


class Keeps(Classifier):
    """Its hook encloses the module, and keeps what only the step lets go."""

    def __init__(self):
        super().__init__()
        self.keep = []
        self.net.register_forward_hook(self.make_hook())

    def make_hook(self):
        return lambda module, inputs, output: self.keep.append(output.detach().repeat(9, 1))

    def training_step(self, batch, batch_idx):
        self.keep.clear()
        return self.loss(batch)


class KeepsWeakly(Keeps):
    def make_hook(self):
        reference = weakref.ref(self)
        return lambda module, inputs, output: reference().keep.append(output.detach().repeat(9, 1))


class KeepsByAnother(Keeps):
    def make_hook(self):
        keep = super().make_hook()

        def hook(module, inputs, output):
            keep(module, inputs, output)

        return hook


class KeepsInASharedList(Keeps):
    def make_hook(self):
        keep = self.keep
        return lambda module, inputs, output: keep.append(output.detach().repeat(9, 1))


class KeepsInALayer(Keeps):
    def make_hook(self):
        layer = self.net[0]

        def hook(module, inputs, output):
            layer.kept = output.detach().repeat(9, 1)

        return hook

    def training_step(self, batch, batch_idx):
        self.net[0].kept = None
        return self.loss(batch)


@pytest.mark.parametrize("kind", [Keeps, KeepsWeakly, KeepsByAnother, KeepsInASharedList, KeepsInALayer])
@pytest.mark.parametrize("profile", [partial(profile_module, emulation=Emulation("cpu")), measure_step])
def test_a_function_that_encloses_the_module_encloses_its_copy(kind, profile):
    module = kind()
    found = profile(module, batch())
    assert peak(found.events) == pytest.approx(true_peak(kind, batch, 4), rel=1e-3)
    assert not found.cautions
    assert module.keep == []
    assert not hasattr(module.net[0], "kept")


REGISTRY = []


class KeepsByAGlobal(Keeps):
    def __init__(self):
        super().__init__()
        REGISTRY[:] = [self]

    def make_hook(self):
        def hook(module, inputs, output):
            REGISTRY[0].kept = output.detach().repeat(9, 1)

        return hook


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_a_step_that_reaches_the_module_by_a_global_is_named(profile):
    module = KeepsByAGlobal()
    assert "`kept` of the module itself" in profile(module, batch()).cautions[0]
    assert not hasattr(module, "kept")
