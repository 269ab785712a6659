"""`Throughput`: samples, tokens and seconds per optimizer step, measured from the end of one batch to the next."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from lightning_memfit.memory.kind import DeviceKind, synchronize


def count_tokens(batch: Any) -> int | None:
    """Number of elements of `input_ids`, padding included; None if the batch has no such entry."""
    if isinstance(batch, torch.Tensor) or not isinstance(batch, Mapping):
        return None
    tokens = batch.get("input_ids")
    return tokens.numel() if isinstance(tokens, torch.Tensor) else None


def count_samples(batch: Any) -> int | None:
    """First dimension of the first tensor in a batch; None if it holds no tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return None
    return next((count for count in map(count_samples, batch) if count is not None), None)


class Throughput:
    """Counts batches from `start` on.

    Time between `pause` and `resume` is left out; time spent waiting for data is included.

    Args:
        device: The run's device. On CUDA the clock is read after the queued kernels are done, but only in `start`,
            `pause`, `resume`, `synchronize` and `stop`: a batch costs no synchronization. Between them, figures are
            those of launching kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: int | None = 0
        self._tokens: int | None = 0
        self._steps = 0
        self._started: float | None = None
        self._paused: float | None = None
        self._last = 0.0
        # Events of the device's own clock: when the host's was last read, and when the last batch is done.
        self._read: Any = None
        self._read_at = 0.0
        self._done: Any = None
        self._is_behind = False

    def start(self) -> None:
        """Begin counting with the next batch."""
        if DeviceKind.of(self._device).is_asynchronous:
            self._read, self._done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        self._started = self._last

    def add(self, batch: Any, stepped: bool) -> None:
        """Count a finished batch, and an optimizer step if the batch ended one. Does nothing before `start`."""
        if self._started is None:
            return
        self._last = time.perf_counter()
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))
            self._is_behind = True
        self._steps += stepped
        if self._tokens is not None:
            count = count_tokens(batch)
            self._tokens = None if count is None else self._tokens + count
        if self._samples is not None:
            count = count_samples(batch)
            self._samples = None if count is None else self._samples + count

    def synchronize(self) -> None:
        """Wait for the device and read the clock."""
        synchronize(self._device)
        self._last = time.perf_counter()
        self._is_behind = False
        if self._read is not None:
            self._read_at = self._last
            self._read.record(torch.cuda.current_stream(self._device))

    def stop(self) -> None:
        """Wait until the device has finished the last batch, and read when that was; no batch may follow.

        What has been done since then doesn't count: a checkpoint that is written at the end of a run, for instance.
        """
        if self._is_behind:
            self._done.synchronize()
            self._last = self._read_at + self._read.elapsed_time(self._done) / 1000
            self._is_behind = False
        self._read = self._done = None

    def pause(self) -> None:
        """Stop the clock, for instance during validation."""
        if self._started is not None:
            self.synchronize()
            self._paused = self._last

    def resume(self) -> None:
        """Let the clock run again."""
        if self._started is not None and self._paused is not None:
            self.synchronize()
            self._started += self._last - self._paused
            self._paused = None

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds of one optimizer step; None before the first one is counted."""
        return self._elapsed / self._steps if self._started is not None and self._steps else None

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second; None before the first step and for batches whose size is unknown."""
        return self._rate(self._samples)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second; None before the first step and for batches without `input_ids`."""
        return self._rate(self._tokens)

    @property
    def _elapsed(self) -> float:
        assert self._started is not None
        return self._last - self._started

    def _rate(self, count: int | None) -> float | None:
        return count / self._elapsed if count and self._steps else None
