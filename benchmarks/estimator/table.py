"""The page `docs/accuracy.md`."""

import json
import statistics
from typing import Any

from benchmarks.estimator import published
from benchmarks.estimator.collected import collect
from benchmarks.marks import RESULTS

_HEAD = """# How accurate the estimates are
An estimate is made from a module without weights. A measurement runs optimizer steps of the real module with
Lightning's Trainer in a process of its own. `python -m benchmarks.pages` makes this page from all committed
results; the files hold every run.

## All runs
Peaks of live tensors, predicted against measured, in all files and folders of results that have both
(`benchmarks/estimator/collected.py`):

{everything}

## The estimator's own runs
On the CPU the measure is the list of allocation events of torch's profiler, scratch memory of kernels included; on CUDA
it is `torch.cuda.max_memory_allocated` and `max_memory_reserved`. MemTracker is torch's own tracker
(`torch.distributed._tools.mem_tracker`) for the same steps; it cannot follow bitsandbytes' optimizers or a loss scaler.
Predictions for the H200 are made anew when the memory model changes. The H100 was held out: each run was predicted on
that machine before it ran, and the predictions are kept.

| | figure | runs | median error | 95th percentile | largest | most under |
|---|---|---|---|---|---|---|
"""


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


def _summary_line(section: str, name: str, errors: list[float]) -> str:
    s = summary(errors)
    return (
        f"| {section} | {name} | {s['runs']} | {100 * s['median']:.4f} % | {100 * s['p95']:.3f} % | "
        f"{100 * s['max']:.3f} % | {100 * s['under']:.3f} % |"
    )


_SECTIONS = {"cpu": "CPU", "cuda": "H200", "cuda_h100": "H100, held out"}
"""Files of results, by what follows `estimator_` in their names, and where they were measured."""


def render(document: dict[str, Any], device: str) -> str:
    """The lines of one file: allocated and reserved memory, and torch's own tracker where it ran."""
    rows = [row for row in document["rows"] if "failed" not in row]
    figures = {
        "allocated": [row["error_allocated"] for row in rows],
        "reserved": [row["error_reserved"] for row in rows if "error_reserved" in row],
        "MemTracker, allocated": [row["mem_tracker"]["error"] for row in rows if "error" in row.get("mem_tracker", {})],
    }
    return "".join(_summary_line(_SECTIONS[device], name, errors) + "\n" for name, errors in figures.items() if errors)


def _everything() -> str:
    """One line for each device, and one for all."""
    found = collect()
    lines = ["| device | results | runs | median error | largest | most under |", "|---|---|---|---|---|---|"]
    for device in (*dict.fromkeys(one.device for one in found), "all"):
        rows = [one for one in found if device in (one.device, "all")]
        s = summary([row.error for row in rows])
        lines.append(
            f"| {device} | {len({row.source for row in rows})} | {s['runs']} | {100 * s['median']:.4f} % | "
            f"{100 * s['max']:.3f} % | {100 * s['under']:.3f} % |"
        )
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    text = _HEAD.format(everything=_everything())
    for device in _SECTIONS:
        text += render(json.loads((RESULTS / f"estimator_{device}.json").read_text()), device)
    return text + published.summary(json.loads(published.RESULT.read_text()))
