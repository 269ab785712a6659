"""Predicted and true peaks of small modules of every kind on the CPU, and whether a trace left all as it was."""

import gc
import os
import random
import statistics
import tempfile
import time
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

import benchmarks.memory_zoo.modules as own
from benchmarks.memory_zoo.modules import ZOO
from benchmarks.runner import Benchmark, Named, Options, Row, Stage, named
from benchmarks.text import by_words, table
from benchmarks.training import Repeated, mark, peak_after_mark
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.allocations import allocation_events
from lightning_memfit.profile.quiet import LIGHTNING, SILENT_TRAINER, loggers_at
from lightning_memfit.profile.step import StepOptions, Workload
from lightning_memfit.profile.trace import Emulation, TraceError, TraceRequest, trace_step

RESULT = "memory_zoo_cpu.json"
_BATCHES = 4


def examine(name: str) -> dict[str, Any]:
    """Predict and measure a module.

    Returns:
        `true_bytes`; `predicted_bytes`, `remarks` and `seconds` of the trace, or `refused`, why there is none; and
        `changed`, what the trace changed, which should be nothing.
    """
    entry = ZOO[name]
    with loggers_at(40, *LIGHTNING, "transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, Any] = {"true_bytes": true_peak(entry)}
        torch.manual_seed(0)
        module, batch = entry.make()
        before, started = _state(module, batch), time.process_time()
        try:
            workload = Workload(module, batch, StepOptions(entry.precision))
            trace = trace_step(TraceRequest(workload, Emulation("cpu")))
            found["predicted_bytes"] = int(trace.events.live_bytes().max())
            found["remarks"] = list(trace.remarks)
        except TraceError as error:
            found["refused"] = str(error)
        found["seconds"] = round(time.process_time() - started, 3)
        after = _state(module, batch)
        found["changed"] = sorted(part for part in before if not _same(before[part], after[part]))
    return found


def true_peak(entry: own.Entry) -> int:
    """Peak of a plain Lightning run by the allocator's events, from where training starts.

    It must run before anything else reads allocation events in the process.
    """
    import lightning.pytorch as pl

    torch.manual_seed(0)
    gc.freeze()  # what is there already isn't looked at: that takes longer than the run
    with allocation_events() as changes:
        module, batch = entry.make()
        gc.collect()
        mark()
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, precision=entry.precision, max_epochs=1, logger=False, **SILENT_TRAINER
        )
        trainer.fit(module, Repeated(batch, _BATCHES))
    gc.unfreeze()
    return peak_after_mark(changes)


def _state(module: Any, batch: Any) -> dict[str, Any]:
    """Everything that a trace could change."""
    leaves = (leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    return {
        "files": sorted((str(path), path.stat().st_mtime_ns) for path in Path().rglob("*")),
        "environment": dict(os.environ),
        "globals": {key: id(value) for key, value in vars(own).items()},
        "random numbers": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),  # noqa: NPY002
        "weights": [(name, tensor.clone()) for name, tensor in module.state_dict().items()],
        "gradients": [parameter.grad is None for parameter in module.parameters()],
        "batch": [(str(index), leaf.detach().clone()) for index, leaf in enumerate(leaves)],
        "attributes": [
            (path, [(key, repr(value)) for key, value in vars(child).items() if key not in _LIVING])
            for path, child in module.named_modules()
        ],
    }


_LIVING = {"_parameters", "_buffers", "_modules"}


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return torch.equal(before, after)
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(_same, before, after))
    return bool(before == after)


def _row(case: Named, options: Options, row: Row) -> Row:
    with tempfile.TemporaryDirectory() as folder:  # empty, to see what a trace writes
        os.chdir(folder)
        try:
            return examine(case.name)
        finally:
            os.chdir("/")


# --- the page ---------------------------------------------------------------------------------------------------------


def conditions() -> dict[str, str]:
    """What true peaks depend on."""
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "not limited")
    return {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "oneDNN": isa}


def apart(row: Row) -> float | None:
    """How far the prediction is from the truth, as a share of it; None where there is none."""
    if "predicted_bytes" not in row or "true_bytes" not in row:
        return None
    return (float(row["predicted_bytes"]) - row["true_bytes"]) / row["true_bytes"]


def say(row: Row) -> str:
    """The difference in a line."""
    difference = apart(row)
    words = row.get("refused", "")[:300] if difference is None else f"{difference:+.3%}"
    return f"{words} {row.get('remarks') or ''} {row.get('changed') or ''}"


def summary(rows: list[Row]) -> dict[str, float]:
    """Figures of all rows: numbers of rows, and differences as shares of the true peak."""
    found = {row["name"]: difference for row in rows if (difference := apart(row)) is not None}
    sizes = sorted(map(abs, found.values()))
    return {
        "modules": len(rows),
        "predicted": len(found),
        "median": statistics.median(sizes),
        "p95": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))],
        "worst_under": min(found.values()),
        "worst_under_unnamed": min(found[row["name"]] for row in rows if row["name"] in found and not row["remarks"]),
        "worst_over": max(found.values()),
        "changed": sum(bool(row.get("changed")) for row in rows),
    }


def farthest(rows: list[Row], head: str, *keys: str) -> str:
    """A table of the ten rows farthest from the truth, with further columns."""
    lines = [
        [row["name"], *(format_bytes(row[key]) for key in ("true_bytes", "predicted_bytes")), f"{apart(row):+.3%}"]
        + [row[key] for key in keys]
        for row in sorted(rows, key=lambda row: -abs(apart(row) or 0))[:10]
    ]
    return table([head, "true peak", "predicted", "difference", *("peak in" for _ in keys)], lines)


def text(document: dict[str, Any]) -> str:
    """The summary, the ten modules farthest off, and what is refused, was changed or has a remark."""
    rows, figures = document["rows"], summary(document["rows"])
    where = ", ".join(f"{name} {value}" for name, value in document["conditions"].items())
    found = [
        ["median", f"{figures['median']:.4%}"],
        ["95th percentile", f"{figures['p95']:.3%}"],
        ["farthest below the truth", f"{figures['worst_under']:+.3%}"],
        ["farthest below without a remark", f"{figures['worst_under_unnamed']:+.3%}"],
        ["farthest above", f"{figures['worst_over']:+.2%}"],
        ["modules that a trace changed", str(figures["changed"])],
    ]
    words = chain(
        by_words(("refused", row["refused"], row["name"]) for row in rows if "refused" in row),
        by_words(("remark", remark, row["name"]) for row in rows for remark in row.get("remarks", ())),
        by_words(("changed", part, row["name"]) for row in rows for part in row.get("changed", ())),
    )
    return "\n".join(
        [
            f"{figures['modules']} modules, of which {figures['predicted']} were predicted ({where}).",
            "",
            table(["of the differences", ""], found),
            "",
            "The ten farthest from the truth:",
            "",
            farthest(rows, "module"),
            "",
            *words,
        ]
    )


BENCHMARK = Benchmark(
    RESULT,
    lambda options: named(ZOO),
    (Stage(_row, timed=False),),
    lambda rows, options: {"conditions": conditions(), "rows": rows},
    say,
    seconds=120,
)
