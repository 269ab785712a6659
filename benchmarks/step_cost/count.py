"""Count what one steady step of a Trainer costs: Python calls, operators, reads of the device, processor time."""

import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

WARMUP, CALLS, OPERATORS, TIMES = 12, 3, 3, 9
STEPS = WARMUP + CALLS + OPERATORS + TIMES
"""Optimizer steps of a run: those in which something is still checked or learned, then those of each measurement."""

_READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "is_nonzero")
_COPIES = ("copy_", "_to_copy", "_foreach_copy_")
_TO_HOST = ("cpu", "numpy", "tolist")
_READ_COUNTER = torch_optimizer._get_value.__code__  # type: ignore[attr-defined]
"""Reads a step counter (torch 2.9 to 2.13), which lies in host memory whatever the device."""


@dataclass(frozen=True)
class Cost:
    """One steady step."""

    calls: int
    """Calls of Python functions, the median of three steps; generators count each time that they go on."""
    operators: int
    """Operators below autograd, of forward, backward and optimizer step, of the middle one of three steps."""
    reads: dict[str, int]
    """Times by name that the host waits for a value: operators such as that of `.item()`, and `.cpu()`."""
    copies: int
    """Operators that copy tensors; on the CPU nothing tells those to the host from others."""
    milliseconds: float
    """Processor time, the median of nine steps."""


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = Counter[str]()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names["counter" if name == "_local_scalar_dense" and _reads_counter() else name] += 1
        return func(*args, **(kwargs or {}))


def _reads_counter() -> bool:
    frame = sys._getframe(2)
    for _ in range(3):  # two of torch's decorators may lie between
        if frame.f_code is _READ_COUNTER or frame.f_back is None:
            break
        frame = frame.f_back
    return frame.f_code is _READ_COUNTER


class StepCost(pl.Callback):
    """Measure steps from the start of one batch to that of the next. To be the first of the Trainer's callbacks.

    Args:
        batches: Batches of one optimizer step.
    """

    def __init__(self, batches: int = 1) -> None:
        self._batches = batches
        self._seen = 0
        self._calls: list[int] = []
        self._to_host = Counter[str]()
        self._operators: list[_Operators] = []
        self._times: list[float] = []

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """End the measurement of one step, and begin that of the next."""
        step, rest = divmod(self._seen, self._batches)
        self._seen += 1
        if rest:
            return
        sys.setprofile(None)
        if WARMUP + CALLS < step <= WARMUP + CALLS + OPERATORS:
            self._operators[-1].__exit__(None, None, None)
        if step >= WARMUP + CALLS + OPERATORS:
            self._times.append(time.process_time())
        elif step >= WARMUP + CALLS:
            self._operators.append(_Operators())
            self._operators[-1].__enter__()
        elif step >= WARMUP:
            self._calls.append(0)
            sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self._calls[-1] += 1
        elif event == "c_call" and argument.__name__ in _TO_HOST and isinstance(argument.__self__, Tensor):
            self._to_host[f".{argument.__name__}()"] += 1

    def cost(self) -> Cost:
        """What was measured, once the run has ended."""
        steps = sorted((mode.names for mode in self._operators), key=Counter.total)
        names = steps[len(steps) // 2]
        reads = {name: names[name] for name in _READS if names[name]}
        reads |= {name: count // CALLS for name, count in self._to_host.items() if count >= CALLS}
        return Cost(
            calls=int(statistics.median(self._calls)),
            operators=names.total(),
            reads=reads,
            copies=sum(names[name] for name in _COPIES),
            milliseconds=1000 * statistics.median(b - a for a, b in pairwise(self._times)),
        )
