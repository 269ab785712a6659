"""Predicted and true peaks of runs on several devices, rank by rank."""

import re
import statistics
import time
import warnings
from functools import partial
from itertools import chain
from typing import Any

from benchmarks.memory_zoo.run import apart, farthest, say
from benchmarks.runner import Benchmark, Row, Stage
from benchmarks.sharded_traces.cases import CASES, Case
from benchmarks.sharded_traces.measure import measured
from benchmarks.text import by_words, table
from lightning_memfit.estimate.division import division_of, estimate_rank
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.quiet import LIGHTNING, loggers_at
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.step import StepOptions, Workload
from lightning_memfit.profile.trace import Emulation, TraceError, TraceRequest, trace_step
from lightning_memfit.strategies.sequence_parallel import SequencesAlone

RESULT = "sharded_traces_cpu.json"


def predict(case: Case) -> dict[str, Any]:
    """Predicted peak of the rank after its first step, for ZeRO-Infinity in any step, and where it is."""
    with loggers_at(40, *LIGHTNING, "transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.process_time()
        found = _in_closed_form(case) if case.under_deepspeed else _by_trace(case)
    return {**found, "seconds": round(time.process_time() - started, 2)}


def _in_closed_form(case: Case) -> dict[str, Any]:
    """DeepSpeed isn't traced: what a trace without it shows in forward and backward, and what DeepSpeed keeps."""
    division = division_of(case.make_strategy(), case.strategy, case.world_size, case.world_size)
    assert division is not None
    module, batch = case.make()
    options = StepOptions(division.traced_precision(case.precision), case.accumulate)  # type: ignore[arg-type]
    emulation, callbacks = Emulation("cpu"), case.make_callbacks()
    size = case.options.get("sequence_parallel_size", 1)
    ranks = Ranks(partial(SequencesAlone, size), case.world_size, case.rank) if size > 1 else None
    profile = profile_module(
        module, batch, options, emulation, callbacks, any_micro_batch=False, cache=None, ranks=ranks
    )
    found = estimate_rank(profile, division)
    return {"predicted_bytes": found.allocated_bytes, "phase": found.phase}


def _by_trace(case: Case) -> dict[str, Any]:
    module, batch = case.make()
    ranks = Ranks(case.make_strategy, case.world_size, case.rank)
    options = StepOptions(case.precision, case.accumulate)
    try:
        workload = Workload(module, batch, options, case.make_callbacks(), ranks=ranks)
        trace = trace_step(TraceRequest(workload, Emulation("cpu"), check_assumptions=False))
    except TraceError as error:
        return {"refused": str(error)}
    live = trace.events.live_bytes()
    later = [at for at, name in trace.events.phases if name == "forward"][options.traced_micro_batches :]
    return {
        "predicted_bytes": int(live[later[0] :].max()),
        "phase": trace.events.phase_at(later[0] + int(live[later[0] :].argmax())),
        "traced_blocks": trace.traced_blocks,
        "remarks": list(trace.remarks),
    }


# --- the page ---------------------------------------------------------------------------------------------------------


def summary(rows: list[Row]) -> dict[str, float]:
    """Figures of all rows: numbers of rows, and differences as shares of the true peak."""
    found = [difference for row in rows if (difference := apart(row)) is not None]
    return {
        "runs": len(rows),
        "compared": len(found),
        "median": statistics.median(map(abs, found)),
        "farthest": max(map(abs, found)),
        "worst_under": min(found),
    }


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of all of torch's strategies, and of all of DeepSpeed's."""
    zero = [row for row in rows if ", zero " in row["name"]]
    return {"all of torch's": [row for row in rows if row not in zero], "all of DeepSpeed's": zero}


def text(document: dict[str, Any]) -> str:
    """The summary, and the ten runs whose predictions are farthest off."""
    rows, parts = document["rows"], dict[str, list[Row]]()
    for row in rows:  # by strategy, such as in `GPT-2, zero 2 offload, 2 ranks, rank 1`, whatever it offloads
        strategy = re.sub(r"^(zero \w+) .*", r"\1", row["name"].split(", ")[1])
        parts.setdefault(f"`{strategy}`", []).append(row)
    lines = []
    for name, part in (parts | groups(rows)).items():
        found = summary(part)
        under = min(0.0, found["worst_under"])
        lines.append([name, str(found["runs"]), f"{found['median']:.3%}", f"{found['farthest']:.2%}", f"{under:+.3%}"])
    words = chain(
        by_words(("refused", row["refused"], row["name"]) for row in rows if "refused" in row),
        by_words(("failed", row["failed"], row["name"]) for row in rows if "failed" in row),
    )
    return "\n".join(
        [
            f"{len(rows)} runs (torch {document['versions']['torch']}).",
            "",
            table(["strategy", "runs", "median difference", "farthest", "farthest below the truth"], lines),
            "",
            "The ten farthest from the truth:",
            "",
            farthest(rows, "run", "phase"),
            "",
            *words,
        ]
    )


BENCHMARK = Benchmark(
    RESULT,
    lambda options: sorted(CASES, key=lambda case: case.world_size),
    (
        Stage(lambda case, options, row: predict(case), timed=False),
        Stage(lambda case, options, row: measured(case, options.seconds / 4)),
    ),
    say=say,
    seconds=480,
)
