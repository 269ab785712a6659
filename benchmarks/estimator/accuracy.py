"""The page `docs/accuracy.md`, of every committed result that has a predicted and a measured peak."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.estimator import published
from benchmarks.runner import read, read_rows
from benchmarks.text import RESULTS, ROOT, table
from lightning_memfit.bench.record import read_result

_HEAD = """# How accurate the estimates are
An estimate is made from a module without weights. A measurement runs optimizer steps of the real module with
Lightning's Trainer in a process of its own. `python -m benchmarks.pages` makes this page from all committed
results; the files hold every run.

## All runs
Peaks of live tensors, predicted against measured, in all files and folders of results that have both
(`benchmarks/estimator/accuracy.py`):

"""
_OWN = """

## The estimator's own runs
On the CPU the measure is the list of allocation events of torch's profiler, scratch memory of kernels included; on CUDA
it is `torch.cuda.max_memory_allocated` and `max_memory_reserved`. MemTracker is torch's own tracker
(`torch.distributed._tools.mem_tracker`) for the same steps; it cannot follow bitsandbytes' optimizers or a loss scaler.
Predictions for the H200 are made anew when the memory model changes. The H100 was held out: each run was predicted on
that machine before it ran, and the predictions are kept.

"""
_PLACES = {"cpu": "CPU", "cuda": "H200", "cuda_h100": "H100, held out"}
"""Where the estimator's runs were measured, by what follows `estimator_` in the names of files."""


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
        for row in read_rows(path):
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
    path = RESULTS / "techniques_cpu.json"
    for row in read_rows(path):
        if "measured_bytes" in row:
            yield Comparison(_name(path), "cpu", row["name"], row["predicted_bytes"], row["measured_bytes"])


def _budgets() -> Iterator[Comparison]:
    """Plans that were executed; those that were only traced again have no measurement."""
    path = RESULTS / "checkpointing_budget.json"
    for case in read_rows(path):
        for row in case["rows"] if case["executed"] else ():
            run = f"{case['name']}, budget {row['budget_bytes']:,} bytes"
            yield Comparison(_name(path), "cpu", run, row["predicted_bytes"], row["observed_bytes"])


def _live_bytes() -> Iterator[Comparison]:
    path = RESULTS / "gpt2xl_live_bytes.json"
    for row in read_rows(path):
        yield Comparison(_name(path), "cpu", f"GPT-2 XL, {row['name']}", row["predicted_bytes"], row["measured_bytes"])


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- the page ---------------------------------------------------------------------------------------------------------


def summary(errors: list[float]) -> dict[str, float]:
    """Median and largest absolute error, and the largest underestimate, as fractions."""
    absolute = sorted(abs(error) for error in errors)
    return {
        "runs": len(errors),
        "median": statistics.median(absolute),
        "p95": absolute[min(len(absolute) - 1, int(0.95 * len(absolute)))],
        "max": absolute[-1],
        "under": max(0.0, *(-error for error in errors)),
    }


def _figures(errors: list[float], *names: str) -> list[str]:
    found = summary(errors)
    return [str(found["runs"]), *(f"{100 * found[name]:.{4 if name == 'median' else 3}f} %" for name in names)]


def _everything() -> str:
    """One line for each device, and one for all."""
    found, lines = collect(), []
    for device in (*dict.fromkeys(one.device for one in found), "all"):
        rows = [one for one in found if device in (one.device, "all")]
        sources = str(len({row.source for row in rows}))
        lines.append([device, sources, *_figures([row.error for row in rows], "median", "max", "under")])
    return table(["device", "results", "runs", "median error", "largest", "most under"], lines)


def _own_runs() -> str:
    """Lines of each file: allocated and reserved memory, and torch's own tracker where it ran."""
    lines = []
    for device, place in _PLACES.items():
        rows = [row for row in read(f"estimator_{device}.json")["rows"] if "failed" not in row]
        trackers = [row["mem_tracker"]["error"] for row in rows if "error" in row.get("mem_tracker", {})]
        errors = {name: [row[f"error_{name}"] for row in rows if f"error_{name}" in row] for name in FIGURES}
        for name, values in (errors | {"MemTracker, allocated": trackers}).items():
            if values:
                lines.append([place, name, *_figures(values, "median", "p95", "max", "under")])
    return table(["", "figure", "runs", "median error", "95th percentile", "largest", "most under"], lines)


FIGURES = ("allocated", "reserved")


def page() -> str:
    """The whole page."""
    return f"{_HEAD}{_everything()}{_OWN}{_own_runs()}\n{published.summary(read(published.RESULT))}"
