"""Every committed result that has a predicted and a measured peak, whatever benchmark made it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_memfit.bench.record import read_result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Comparison:
    """One run, of one file or folder of results."""

    source: str
    """File or folder, from the root of the repository."""
    device: str
    run: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def collect() -> list[Comparison]:
    """All comparisons, by source.

    Where a file holds several kinds of peak, that of live tensors is meant, on CUDA that of the allocator's counter.
    """
    return [*_estimator(), *_records(), *_techniques(), *_budgets(), *_live_bytes()]


def _estimator() -> Iterator[Comparison]:
    for path in sorted(RESULTS.glob("estimator_*.json")):
        device = path.stem.removeprefix("estimator_").partition("_")[0]  # the rest names the card
        for row in _rows(path):
            if "failed" not in row:
                peaks = (row[name]["allocated_bytes"] for name in ("predicted", "measured"))
                yield Comparison(_name(path), device, row["name"], *peaks)


def _records() -> Iterator[Comparison]:
    """Folders of `memfit bench` and `memfit scale`."""
    for path in sorted(RESULTS.glob("*/*.json")):
        if path.parent.name == "gpu":  # the suite's own
            continue
        result = read_result(path)
        if result.prediction_error is not None:
            assert result.predicted is not None
            assert result.measured is not None
            assert result.measured.allocated_bytes is not None
            peaks = result.predicted.allocated_bytes, result.measured.allocated_bytes
            yield Comparison(_name(path.parent), result.device, result.title, *peaks)


def _techniques() -> Iterator[Comparison]:
    for path in sorted(RESULTS.glob("techniques_*.json")):
        device = path.stem.removeprefix("techniques_")
        for row in _rows(path):
            if "measured_bytes" in row:
                yield Comparison(_name(path), device, row["name"], row["predicted_bytes"], row["measured_bytes"])


def _budgets() -> Iterator[Comparison]:
    """Plans that were executed; those that were only traced again have no measurement."""
    path = RESULTS / "checkpointing_budget.json"
    for case in _rows(path, "cases"):
        for row in case["rows"] if case["executed"] else ():
            run = f"{case['name']}, budget {row['budget_bytes']:,} bytes"
            yield Comparison(_name(path), "cpu", run, row["predicted_bytes"], row["observed_bytes"])


def _live_bytes() -> Iterator[Comparison]:
    path = ROOT / "benchmarks" / "gpt2xl_live_bytes" / "result.json"
    for case in _rows(path, "cases") if path.exists() else ():
        run = f"GPT-2 XL, {case['name']}"
        yield Comparison(_name(path), "cpu", run, case["predicted_bytes"], case["measured_bytes"])


def _rows(path: Path, key: str = "rows") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[key]
    return rows


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))
