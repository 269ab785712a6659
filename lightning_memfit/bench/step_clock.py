"""`StepClock`: times and losses of optimizer steps, whoever runs them; `ResidentGrowth`: what they add to memory.

`StepClock` serves Lightning's runs and those of other tools alike. `ResidentGrowth` measures what a run adds to the
resident memory of its process, without libraries and whatever came before.
"""

import contextlib
import ctypes
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_memfit.bench.record import Speed
from lightning_memfit.measure.throughput import count_samples, count_tokens
from lightning_memfit.memory.kind import synchronize


@dataclass
class TimedStep:
    """Figures of one optimizer step."""

    seconds: float = 0.0
    waited: float = 0.0
    samples: int | None = 0
    tokens: int | None = 0


class StepClock:
    """Time every optimizer step after a warm-up, and keep the first and the last loss.

    On CUDA it waits for the device at the end of every optimizer step, so that each time belongs to its own step.

    Args:
        warmup_steps: Optimizer steps before the clock starts.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.num_steps = 0
        self.steps: list[TimedStep] = []
        self._current = TimedStep()
        self._last = 0.0
        self._step_start = 0.0
        self._losses: list[torch.Tensor] = []
        self._first: list[torch.Tensor] = []
        self._final: list[torch.Tensor] = []

    def start(self) -> None:
        """Start the clock before the first step."""
        self._step_start = self._last = time.perf_counter()

    def batch_starts(self) -> None:
        """Count the time between two batches as waiting."""
        self._current.waited += time.perf_counter() - self._last

    def batch_ends(self, batch: Any, loss: torch.Tensor | None) -> None:
        """Count a micro-batch. The losses of a step are added, so each must already be divided by their number."""
        self._current.samples = _sum(self._current.samples, count_samples(batch))
        self._current.tokens = _sum(self._current.tokens, count_tokens(batch))
        if loss is not None:
            self._losses.append(loss.detach())
        self._last = time.perf_counter()

    def step_ends(self, device: torch.device) -> None:
        """Finish an optimizer step."""
        synchronize(device)
        self._current.seconds = time.perf_counter() - self._step_start
        self.num_steps += 1
        if self.num_steps > self.warmup_steps:
            self.steps.append(self._current)
        self._current = TimedStep()
        self._first = self._first or self._losses
        self._final, self._losses = self._losses, []
        self._step_start = self._last = time.perf_counter()

    @property
    def losses(self) -> tuple[float | None, float | None]:
        """Loss of the first and of the last optimizer step, averaged over the micro-batches."""
        return _total(self._first), _total(self._final)

    def speed(self, num_replicas: int = 1) -> Speed | None:
        """Return median and quantiles of the step times, and rates; None before the first timed step."""
        if not self.steps:
            return None
        seconds = torch.tensor([step.seconds for step in self.steps], dtype=torch.float64)
        low, median, high = (float(seconds.quantile(q)) for q in (0.05, 0.5, 0.95))
        samples, tokens = (_mean([getattr(step, name) for step in self.steps]) for name in ("samples", "tokens"))
        return Speed(
            timed_steps=len(self.steps),
            step_seconds_median=median,
            step_seconds_q05=low,
            step_seconds_q95=high,
            samples_per_second=None if samples is None else samples * num_replicas / median,
            tokens_per_second=None if tokens is None else tokens * num_replicas / median,
            data_wait_fraction=sum(step.waited for step in self.steps) / float(seconds.sum()),
        )


def _total(losses: list[torch.Tensor]) -> float | None:
    return float(torch.stack([loss.float() for loss in losses]).sum()) if losses else None


def _sum(total: int | None, count: int | None) -> int | None:
    return None if total is None or count is None else total + count


def _mean(counts: list[int | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return sum(known) / len(known) if len(known) == len(counts) and any(known) else None


# --- resident memory --------------------------------------------------------------------------------------------------


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK_ONLY = "5"  # `man 5 proc`: reset the peak of the resident set


class ResidentGrowth:
    """Peak of the resident set from `start` on, minus what was resident at `start`.

    Works on Linux only, whose kernel can reset the peak; elsewhere the growth is None. `start` collects garbage and
    makes the allocator return free pages, so that the run cannot reuse memory that was freed before it.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def start(self) -> None:
        """Remember what is resident, and reset the peak."""
        gc.collect()
        if sys.platform != "linux":
            return
        with contextlib.suppress(AttributeError, OSError):  # only glibc has it
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        try:
            _CLEAR.write_text(_PEAK_ONLY)
            self._before = _read("VmRSS")
        except OSError:  # a kernel without it, or a sandbox
            self._before = None

    @property
    def growth_bytes(self) -> int | None:
        """Growth in bytes, exact to a page; None before `start`, or if the system doesn't tell."""
        return None if self._before is None else max(0, _read("VmHWM") - self._before)


def _read(name: str) -> int:
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
