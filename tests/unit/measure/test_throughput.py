from collections import UserDict

import pytest
import torch

from lightning_memfit.measure import throughput
from lightning_memfit.measure.throughput import Throughput, count_samples, count_tokens


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


def test_a_batch_of_unknown_size_gives_no_rate(clock):
    meter = Throughput(torch.device("cpu"))
    meter.start()
    clock.now += 1
    meter.add("text", stepped=True)
    assert (meter.samples_per_second, meter.seconds_per_step) == (None, 1)
