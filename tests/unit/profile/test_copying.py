import csv
import io
import multiprocessing
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_memfit.profile.build import measure_step
from lightning_memfit.profile.copying import Untouchable, copied
from lightning_memfit.profile.trace import TraceError

from .modules import Classifier, batch, peak, trace_cpu


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
