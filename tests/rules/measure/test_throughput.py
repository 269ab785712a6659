import time
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

from lightning_memfit.measure import throughput
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.measure.throughput import Throughput, count_samples, count_tokens
from lightning_memfit.measure.utilization import FlopsMonitor
from lightning_memfit.memory.kind import DeviceKind
from tests.helpers.modules import Layers
from tests.helpers.trainers import quiet_trainer


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        ({"input_ids": torch.zeros(4, 8), "labels": torch.zeros(4)}, 4, 32),
        (UserDict(input_ids=torch.zeros(4, 8)), 4, 32),
        ((torch.zeros(3, 2), torch.zeros(3)), 3, None),
        (["text", {"x": torch.zeros(5)}], 5, None),
        (torch.zeros(7, 1), 7, None),
        (torch.tensor(1.0), 1, None),
        ("text", None, None),
        ([], None, None),
    ],
)
def test_batches_are_counted(batch, samples, tokens):
    assert (count_samples(batch), count_tokens(batch)) == (samples, tokens)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(throughput.time, "perf_counter", lambda: Clock.now)
    return Clock


def test_rates_leave_pauses_out(clock):
    meter = Throughput(torch.device("cpu"))
    batch = {"input_ids": torch.zeros(2, 10)}
    meter.add(batch, stepped=True)
    assert (meter.seconds_per_step, meter.tokens_per_second) == (None, None)
    meter.start()
    clock.now += 1
    meter.add(batch, stepped=False)
    meter.pause()
    clock.now += 50
    meter.resume()
    clock.now += 1
    meter.add(batch, stepped=True)
    assert meter.seconds_per_step == pytest.approx(2)
    assert meter.tokens_per_second == pytest.approx(20)
    assert meter.samples_per_second == pytest.approx(2)


# A device that runs behind the host.


class Queue:
    """A stand-in for a CUDA device: steps are launched at once and run one after another, each for 20 ms."""

    STEP_SECONDS = 0.02

    def __init__(self):
        self.idle_at = 0.0

    def launch(self):
        self.idle_at = max(self.idle_at, time.perf_counter()) + self.STEP_SECONDS

    def synchronize(self, device=None):
        time.sleep(max(0.0, self.idle_at - time.perf_counter()))

    def event(self, enable_timing):
        return Event(self)


class Event:
    """An event on it."""

    def __init__(self, queue):
        self.queue = queue

    def record(self, stream):
        self.at = max(self.queue.idle_at, time.perf_counter())

    def synchronize(self):
        time.sleep(max(0.0, self.at - time.perf_counter()))

    def elapsed_time(self, later):
        assert time.perf_counter() >= later.at, "torch raises an error for an event that is not done yet"
        return 1000 * (later.at - self.at)


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(throughput, "DeviceKind", SimpleNamespace(of=lambda device: DeviceKind.of("cuda")))
    monkeypatch.setattr(throughput, "synchronize", queue.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return queue


class Launched(Layers):
    """Its steps are launched on a queue; the end of training waits, as for a checkpoint."""

    def __init__(self, queue):
        super().__init__(8, 8, 1)
        self.queue = queue

    def training_step(self, batch, batch_idx):
        self.queue.launch()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        time.sleep(0.5)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 8)), batch_size=1)


@pytest.mark.parametrize("kind", [MemoryMonitor, FlopsMonitor])
def test_steps_take_as_long_as_the_device_runs(kind, queue, tmp_path):
    monitor = kind() if kind is FlopsMonitor else kind(tracked_steps=1)
    quiet_trainer(monitor, max_epochs=1, log_every_n_steps=1000, default_root_dir=tmp_path).fit(Launched(queue))
    assert monitor._throughput.seconds_per_step == pytest.approx(queue.STEP_SECONDS, rel=0.4)
    if kind is MemoryMonitor:
        assert monitor.report.seconds_per_step == monitor._throughput.seconds_per_step


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_that_runs_behind_is_waited_for():
    device = torch.device("cuda", torch.cuda.current_device())
    meter = Throughput(device)
    torch.cuda._sleep(1000)
    meter.start()
    before = time.perf_counter()
    for _ in range(4):
        torch.cuda._sleep(100_000_000)
        meter.add(torch.zeros(2), stepped=True)
    launched = time.perf_counter() - before
    torch.cuda.synchronize()
    seconds = time.perf_counter() - before
    time.sleep(0.2)
    meter.stop()
    assert launched < seconds / 2
    assert 4 * meter.seconds_per_step == pytest.approx(seconds, rel=0.05)
