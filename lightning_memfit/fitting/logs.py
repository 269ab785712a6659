"""Values logged by the micro-batches of one step, held back and logged once for the whole batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("sum", torch.sum, sum), torch.add),
    **dict.fromkeys(("max", torch.max, max), torch.maximum),
    **dict.fromkeys(("min", torch.min, min), torch.minimum),
}


@dataclass
class _Record:
    """One name, logged once by every micro-batch. Values are combined as they come, so that few tensors stay alive."""

    arguments: dict[str, Any]
    last: Any = None
    combined: Tensor | None = None
    weight: float = 0.0
    count: int = 0

    def add(self, value: Any, weight: float) -> None:
        """Add the value of one micro-batch; one without weight (all labels masked) is left out."""
        self.count += 1
        self.last = value
        if not weight or not isinstance(value, Tensor):
            return
        reduce = _REDUCTIONS.get(self.arguments.get("reduce_fx", "mean"))
        if reduce is not None:
            self.combined = value if self.combined is None else reduce(self.combined, value)
        else:
            self.combined = value * weight if self.combined is None else self.combined + value * weight
            self.weight += weight

    def value(self) -> Any:
        """The value over the whole batch."""
        if self.count == 1 or self.combined is None:
            return self.last
        return self.combined / self.weight if self.weight else self.combined


class _Capture(AbstractContextManager[None]):
    """A result collection whose `log` is ours meanwhile. A class, not a generator: it is entered in every step."""

    __slots__ = ("_record", "_results")

    def __init__(self, results: Any, record: Callable[..., None]) -> None:
        self._results = results
        self._record = record

    def __enter__(self) -> None:
        self._results.log = self._record

    def __exit__(self, *_: Any) -> None:
        del self._results.log


class StepLogs:
    """Stand in for a `_ResultCollection.log` while micro-batches run.

    Nothing reaches Lightning before `commit`: a failed attempt leaves no trace, `sync_dist=True` reduces once a step
    and never between a failure and its discovery. Means are weighted by the `batch_size` passed to `self.log`,
    otherwise as the loss is; values of micro-batches without weight (all labels masked) are left out.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], _Record] = {}
        self.weight = 1.0

    def __bool__(self) -> bool:
        return bool(self._records)

    def clear(self) -> None:
        """Forget what was logged."""
        self._records.clear()

    def capture(self, results: Any) -> AbstractContextManager[None]:
        """Receive what is logged to a result collection of Lightning within the context."""
        return _Capture(results, self._record)

    def commit(self, results: Any) -> None:
        """Log every name once, with its value over the whole batch."""
        records, self._records = self._records, {}
        for (fx, name), record in records.items():
            results.log(fx, name, record.value(), **record.arguments)

    def metrics_on_step(self) -> set[int]:
        """Ids of the metric objects that were logged with `on_step=True`."""
        return {
            id(record.last)
            for record in self._records.values()
            if isinstance(record.last, Metric) and record.arguments.get("on_step")
        }

    def _record(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        batch_size = arguments.get("batch_size")
        record = self._records.get((fx, name))
        if record is None:
            record = self._records[fx, name] = _Record(arguments)
        # The clone is taken because what is logged may be changed in place by the next micro-batch.
        value = value.detach().clone() if isinstance(value, Tensor) else value
        record.add(value, self.weight if batch_size is None else float(batch_size))
        if batch_size is not None and record.count > 1:
            record.arguments["batch_size"] += batch_size
